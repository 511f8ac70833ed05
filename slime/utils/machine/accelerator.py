"""Owns the device: its kind, number and memory, and torch's module for it.

No other module names `torch.cuda` or a library of collectives, so a new kind of device is a row of
`slime.utils.machine.devices` and what this file says of it.
"""

from __future__ import annotations

import torch
import torch.cuda as gpu  # of CUDA and of HIP builds: torch has one name for both

from slime.utils.machine.devices import Device, device_of
from slime.utils.machine.shared_gpu import ranks_per_gpu


def device_type() -> str:
    return "cuda" if gpu.is_available() else "cpu"


def kind(device: torch.device | None = None) -> Device:
    """Return the row of a device; None: that of this machine."""
    name = device_type() if device is None else device.type
    return device_of(name, hip=torch.version.hip is not None)


def collectives(device: torch.device | None = None) -> str:
    """Return the backend of torch.distributed for tensors of a device."""
    return kind(device).collectives


def library_versions() -> dict[str, str]:
    """Return the versions of the GPU libraries that torch was built with; ranks must have the same."""
    version = torch.version.hip or torch.version.cuda
    if version is None:
        return {}
    row = device_of("cuda", hip=torch.version.hip is not None)
    name = "ROCm" if torch.version.hip else "CUDA"
    return {name: version, row.library: ".".join(map(str, gpu.nccl.version()))}


def has_fnuz(device: torch.device) -> bool:
    """Return whether the device multiplies e4m3fnuz in place of e4m3fn, as MI300 does."""
    row = kind(device)
    architecture = getattr(gpu.get_device_properties(device), "gcnArchName", "") if row.fnuz else ""
    return architecture.partition(":")[0] in row.fnuz


def device_count() -> int:
    """Return the number of visible GPUs, each as often as ranks may share it; 0 on a CPU machine."""
    return gpu.device_count() * ranks_per_gpu() if gpu.is_available() else 0


def has_bfloat16() -> bool:
    """Return whether the visible GPUs multiply bfloat16 natively; older ones emulate it."""
    return gpu.is_available() and gpu.is_bf16_supported(including_emulation=False)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the precision of --dtype on a device; `auto` is float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" and has_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def drain_peak_memory() -> int | None:
    """Return the most bytes in use on this process's device since the last call; None on a CPU.

    Other processes count with their present usage: an engine allocates all of its memory at its start, and
    keeps or releases it as a whole.
    """
    if not gpu.is_available():
        return None
    free, total = gpu.mem_get_info()
    others = total - free - gpu.memory_reserved()
    peak = others + gpu.max_memory_reserved()
    gpu.reset_peak_memory_stats()
    return peak


def empty_cache() -> None:
    if gpu.is_available():
        gpu.empty_cache()
