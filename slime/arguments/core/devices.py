"""Counts the accelerators of this machine, cheaply, and only when a flag's value depends on it."""

import os

from slime.utils.machine.described import described
from slime.utils.machine.devices import DEVICES

# Without one of these nodes there is no usable GPU, so torch need not be loaded.
DEVICE_NODES = tuple(node for row in DEVICES.values() for node in row.nodes)


def visible_gpus(*, here: bool = False) -> int:
    """Return the number of GPUs that this process can use, or, unless `here`, that a plan describes."""
    if not here and (machine := described.get()) is not None:
        return machine[0]
    if not any(os.path.exists(node) for node in DEVICE_NODES):
        return 0
    # Loading torch takes seconds; a machine without GPUs skips it for --help and misspelt flags.
    from slime.utils.machine.accelerator import device_count

    return device_count()


def gpu_bytes() -> int | None:
    """Return the memory of the first visible GPU, without allocating any; None on a CPU machine."""
    if (machine := described.get()) is not None:
        return machine[1]
    if not visible_gpus():
        return None
    from slime.utils.machine.accelerator import gpu  # torch was loaded when the GPUs were counted

    return int(gpu.get_device_properties(0).total_memory)
