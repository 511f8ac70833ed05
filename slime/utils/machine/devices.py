"""Kinds of devices: what a run decides differently on CUDA, ROCm and a CPU, as data.

`slime.utils.machine.accelerator.kind()` returns the row of this process.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. `torch_name`: what torch calls it; a HIP build of torch says "cuda" as well."""

    help: str
    torch_name: str
    collectives: str  # backend of torch.distributed; a HIP build has RCCL under the name "nccl"
    library: str  # what then does the work, in messages and in the facts of a host
    nodes: tuple[str, ...] = ()  # without one of these files there is no such device
    visible: str | None = None  # variable that chooses the GPUs of a process
    # Rows of backends.attention.packed_documents.OPERATORS that are tried; if none, torch's own attention.
    attention: tuple[str, ...] = ()
    # GPU architectures whose 8-bit numbers are e4m3fnuz: they end at 240, where those of e4m3fn end at 448.
    fnuz: tuple[str, ...] = ()


DEVICES: dict[str, Device] = {
    "cuda": Device(
        "NVIDIA GPUs",
        "cuda",
        "nccl",
        "NCCL",
        nodes=("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"),
        visible="CUDA_VISIBLE_DEVICES",
        attention=("FlashAttention-4", "cuDNN for long documents"),
    ),
    "rocm": Device(
        "AMD GPUs with a HIP build of torch, whose attention is that of AOTriton or CK",
        "cuda",
        "nccl",
        "RCCL",
        nodes=("/dev/kfd",),
        visible="HIP_VISIBLE_DEVICES",
        fnuz=("gfx940", "gfx941", "gfx942"),
    ),
    "cpu": Device("a machine without GPUs", "cpu", "gloo", "gloo"),
}
COLLECTIVES = tuple(dict.fromkeys(row.collectives for row in DEVICES.values()))


def device_of(torch_name: str, *, hip: bool) -> Device:
    """Return the row of a torch device type, in a HIP build of torch or another."""
    return DEVICES["rocm" if hip and torch_name == "cuda" else torch_name]


def device_of_nodes() -> Device:
    """Return the row of this machine by its device files, without loading torch."""
    return next((row for row in DEVICES.values() if any(map(os.path.exists, row.nodes))), DEVICES["cpu"])


def visible_variable() -> str:
    """Return the variable that chooses the GPUs of a process; without any, that of NVIDIA's."""
    return device_of_nodes().visible or DEVICES["cuda"].visible or ""
