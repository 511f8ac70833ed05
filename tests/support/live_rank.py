"""One trainer rank of a live push by handles, as a process: `python live_rank.py RANK WORLD PORT JOB`.

JOB is JSON: `targets` (url and GPUs of each engine), `version`, and `model` (a folder
whose weights are sent) or `segments` (the prefix of shared memory that stands in for
a device's). Without a model, rank r sends tensors of value 10 b + r in bucket b.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.utils.machine import shm
from slime.weight_sync import cuda_ipc
from slime.weight_sync.base import SenderOptions, Target
from slime.wire.manifest import TensorEntry

NUM_BUCKETS = 5


class SharedBuffers(cuda_ipc.CudaIpcSender):
    """Buffers that another process maps by name, as an engine maps a device's memory by a handle."""

    prefix = ""
    names: dict[int, str] = {}  # noqa: RUF012 - address of a buffer -> its segment

    def _buffer(self, slot: int, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._buffers[slot] is None:
            segment = shm.create_segment(nbytes, self.prefix)
            self._buffers[slot] = segment.buffer
            self.names[segment.buffer.data_ptr()] = segment.name
        return self._buffers[slot]


def name_of_segment(flat: torch.Tensor, entries: tuple[TensorEntry, ...], *, reader_device: int) -> str:
    return json.dumps({"segment": SharedBuffers.names[flat.data_ptr()], "device": reader_device})


def main(rank: int, world: int, port: int, job: dict) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    sender_class = cuda_ipc.CudaIpcSender
    if "segments" in job:
        SharedBuffers.prefix, cuda_ipc.pack_bucket = job["segments"], name_of_segment
        sender_class = SharedBuffers
    sender = sender_class(SenderOptions("slime-x", Path("unused"), "model", rank=rank))
    targets = tuple(Target(url, 1, len(gpus), tuple(gpus)) for url, gpus in job["targets"])
    sender.open(job["version"], targets)
    if "model" in job:
        items = [
            item
            for file in sorted(Path(job["model"]).glob("*.safetensors"))
            for item in load_file(file).items()
        ]
        buckets = [items[i : i + 5] for i in range(0, len(items), 5)]
    else:
        buckets = [[("a", torch.full((1000,), 10.0 * b + rank))] for b in range(NUM_BUCKETS)]
    for bucket in buckets:
        sender.send(bucket)
    report = sender.finish()
    sender.close()
    dist.barrier()
    print(json.dumps({"failures": report.failures, "num_tensors": report.num_tensors}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), json.loads(sys.argv[4]))
