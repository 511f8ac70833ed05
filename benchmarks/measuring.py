"""Seconds and bytes of a call on a device, once it is done with its work."""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from slime.utils.machine.children import thread_environment
from slime.utils.machine.cores import num_cores


def as_a_trainer() -> None:
    """Begin this script again with the threads that a trainer's process has: as many as cores, and none that
    spins. Spinning ones made steps of a mixture of experts up to a fifth longer, and the first ones most.
    """
    wanted = thread_environment(num_cores())
    if any(name not in os.environ for name in wanted):
        environment = {**wanted, **os.environ}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def present_device(name: str) -> str:
    """A --device that this machine has, for a parser of arguments."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is neither cpu nor cuda")
    if name != "cpu" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{name}: torch finds no GPU on this machine")
    return name


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], Any], device: torch.device, *, warmup: int = 2, repeats: int = 5) -> float:
    """Median wall time of a call that ends when the device is done."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def matrix_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a bf16 product of random square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device, warmup=3, repeats=10)
