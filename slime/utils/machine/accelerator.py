"""What this machine computes with: the device, how many, and how ranks talk to each other."""

from __future__ import annotations

import torch


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """Visible GPUs; 0 on a CPU machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_bfloat16() -> bool:
    """Whether the visible GPUs multiply bfloat16 themselves; older ones emulate it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of --dtype on a device. `auto` where nothing is known of the model: float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" and has_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def process_group_backend() -> str:
    """CPU tensors need gloo even on a GPU machine (checkpoints, small exchanges)."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def take_peak_memory() -> int | None:
    """Most bytes in use on this process's device since this
    was last asked, those of others included; None on a CPU.

    Others count with what they hold now: engines take their
    memory at their start, and keep it or release it whole.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    peak = others + torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
