"""Counts the accelerators of this machine, cheaply, and only when a flag's value depends on it."""

import os

# Without one of these nodes no CUDA or ROCm device can be used, and torch need not be loaded to say so.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def visible_gpus() -> int:
    """GPUs that this process can use; 0 on a CPU machine."""
    if not any(os.path.exists(node) for node in DEVICE_NODES):
        return 0
    # Loads torch, seconds that a machine without GPUs need not spend on --help or a misspelt flag.
    from slime.utils.machine.accelerator import device_count

    return device_count()


def gpu_bytes() -> int | None:
    """Memory of the first visible GPU; None on a CPU machine. The driver takes none of it to find out."""
    if not visible_gpus():
        return None
    import torch  # counting the GPUs has loaded it already

    return int(torch.cuda.get_device_properties(0).total_memory)
