"""Where the tests of trainers compute: on the CPU by default, and with SLIME_TEST_DEVICE=cuda on a GPU.

The ranks of a test then share the first GPU and use NCCL, so that one device shows what several would do.
"""

import os

import torch
import torch.distributed as dist

from slime.utils.machine.shared_gpu import nccl_on_one_gpu

DEVICE = os.environ.get("SLIME_TEST_DEVICE", "cpu")


def join_ranks(rank: int, world_size: int, meeting: str) -> None:
    """Join the process group of a test: gloo on this machine's loopback, and NCCL for a GPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if DEVICE != "cpu":
        os.environ.update(nccl_on_one_gpu(f"rank-{rank}"))
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size)


def rounding(on_cpu: float, on_gpu: float) -> float:
    """Return the tolerance of this device: a GPU adds in another order with every layout."""
    return on_cpu if DEVICE == "cpu" else on_gpu


# How closely log-probs of an engine agree with those of the plain fp32 model: on a GPU SGLang uses bf16.
CLOSE = rounding(1e-4, 0.3)
# How closely the metrics of two layouts agree, as arguments of pytest.approx.
SAME = {"rel": rounding(1e-4, 1e-3), "abs": rounding(1e-5, 1e-4)}
