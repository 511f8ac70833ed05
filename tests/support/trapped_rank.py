"""A run whose trainer ranks are killed, stopped or fail at chosen points of their own work.

    python tests/support/trapped_rank.py '[{"point": "optimizer", "nth": 2, "note": "struck"}]' train.py FLAGS

At the nth time that a rank reaches the point it strikes itself, once in a run: the file `note` says so.
`how`: "kill" (SIGKILL, the default), "stop" (SIGSTOP), "raise" (a mistake of the user's code, every time),
"wait" (it waits there until its host is killed; the note is the host's name), "cut copies" or "flip copies"
(the copies in memory are damaged, then it is killed). Ranks on Ray get the traps by --train-env-vars.
"""

import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from slime.cluster.training.train_actor import RankProcess  # noqa: E402

# Point -> a function of a rank, and whether the strike comes after it.
POINTS = {
    "backward": ("slime.backends.fsdp.backend:FSDPBackend._accumulate", True),
    "optimizer": ("slime.backends.fsdp.backend:FSDPBackend._apply", True),
    "megatron's optimizer": ("slime.backends.megatron.backend:MegatronBackend._apply", True),
    "push": ("slime.weight_sync.shared_memory:SharedMemorySender.send", True),
    "any push": ("slime.cluster.training.rank_sender:RankSender._stream", False),
    "checkpoint": ("slime.backends.fsdp.dcp_checkpoint:_write", True),
    "checksums": ("slime.cluster.training.train_actor:TrainActor.finish_save", False),
}
TRAPS = "SLIME_TEST_TRAPS"


class TrappedRank(RankProcess):
    """A rank that sets its traps before it loads its model."""

    def __init__(self, args, run, rank, world_size):
        super().__init__(args, run, rank, world_size)
        for trap in json.loads(os.environ[TRAPS]):
            if trap.get("rank", 0) == rank:
                set_trap(trap)


def set_trap(trap: dict) -> None:
    (module, _, path), after = POINTS[trap["point"]][0].partition(":"), POINTS[trap["point"]][1]
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, count = getattr(owner, name), [0]

    @functools.wraps(original)
    def trapped(*args, **kwargs):
        count[0] += 1
        struck = count[0] == trap["nth"]
        answer = original(*args, **kwargs) if after or not struck else None
        if struck:
            strike(trap)
        return answer if after or not struck else original(*args, **kwargs)

    setattr(owner, name, trapped)


def strike(trap: dict) -> None:
    note = Path(trap["note"])
    if trap.get("how") == "raise":
        note.open("a").write("x")
        raise ValueError("a mistake in a loss")
    if note.exists():
        return
    waits = trap.get("how") == "wait"
    note.write_text(socket.gethostname() if waits else str(os.getpid()))
    if waits:
        threading.Event().wait()
    if trap.get("how", "").endswith("copies"):
        damage_copies(trap["how"].split()[0])
        trap = {}
    os.kill(os.getpid(), signal.SIGSTOP if trap.get("how") == "stop" else signal.SIGKILL)


def damage_copies(how: str) -> None:
    """Those of this run: the largest file of each is cut short, or has a bit flipped."""
    driver = f"slime-{os.getppid()}-"
    for folder in Path("/dev/shm").glob(f"{driver}*-state-*"):
        path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data)


def main() -> None:
    os.environ[TRAPS], script, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    importlib.import_module("slime.cluster.training.train_group").RankProcess = TrappedRank
    module = "slime.cli.train_async" if "async" in script else "slime.cli.train"
    raise SystemExit(importlib.import_module(module).main(flags) or 0)


if __name__ == "__main__":
    importlib.import_module("trapped_rank").main()
