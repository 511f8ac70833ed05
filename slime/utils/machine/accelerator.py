"""Reports what this machine computes with: the kind and number of devices, and how ranks communicate."""

from __future__ import annotations

import torch

from slime.utils.machine.shared_gpu import ranks_per_gpu


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """Return the number of visible GPUs, each as often as ranks may share it; 0 on a CPU machine."""
    return torch.cuda.device_count() * ranks_per_gpu() if torch.cuda.is_available() else 0


def has_bfloat16() -> bool:
    """Return whether the visible GPUs multiply bfloat16 natively; older ones emulate it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the precision of --dtype on a device; `auto` is float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" and has_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def drain_peak_memory() -> int | None:
    """Return the most bytes in use on this process's device since the last call; None on a CPU.

    Other processes count with their present usage: an engine allocates all of its memory at its start, and
    keeps or releases it as a whole.
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
