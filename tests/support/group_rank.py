"""One member of broadcast groups: `python group_rank.py RANK DEADLINE_S`.

Each line of input is a job, and has one line of output when it is done. `join`: [port, world size, name] of a
group. `broadcast`: a number of values that rank 0 sends to the others; `over`: a file, which ends it once it
exists. After an error the member ends the group, and computes something: it is alive.
"""

import datetime
import json
import sys
import time
from pathlib import Path

import torch
from devices import DEVICE
from patience import PATIENCE_S
from torch.distributed import TCPStore

from slime.utils.machine.process_groups import LOOPBACK, BroadcastGroup


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def join(rank: int, port: int, world_size: int, name: str) -> BroadcastGroup:
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    store = TCPStore(LOOPBACK, port, world_size, False, timeout, wait_for_workers=False)
    return BroadcastGroup(store, rank, world_size, "gloo" if DEVICE == "cpu" else "nccl", name, timeout)


def main(rank: int, deadline_s: float) -> None:
    torch.set_num_threads(1)
    group: BroadcastGroup | None = None
    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "join" in job:
            group = join(rank, *job["join"])
            say(joined=True)
            continue
        values = [1.0, 2.0] if rank == 0 else [0.0, 0.0]
        tensors = [torch.full((job["broadcast"],), value, device=DEVICE) for value in values]
        say(begun=True)
        started = time.monotonic()
        try:
            group.broadcast(tensors, deadline_s, lambda job=job: Path(job.get("over", "-")).exists())
        except RuntimeError as error:
            group.end()
            seconds = time.monotonic() - started
            say(error=str(error), seconds=seconds, alive=torch.ones(3, device=DEVICE).sum().item() == 3)
        else:
            say(means=[tensor.mean().item() for tensor in tensors])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
