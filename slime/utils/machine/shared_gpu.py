"""Lets several processes of a run share one GPU, so that a layout of many GPUs can be tried on one.

`SLIME_RANKS_PER_GPU=4` makes every GPU of this machine count as four. It is for development: the processes
share the memory and the time of the device, and exchange tensors over loopback sockets.
"""

import os
from collections.abc import Sequence

from slime.utils.machine.devices import visible_variable

VARIABLE = "SLIME_RANKS_PER_GPU"


def ranks_per_gpu() -> int:
    """Return as how many GPUs each one counts: 1, unless the variable says otherwise."""
    text = os.environ.get(VARIABLE) or "1"
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE} is {text!r}: it must be a whole number of at least 1.")
    return int(text)


def device_environment(gpu_ids: Sequence[int]) -> dict[str, str]:
    """Return the environment of a process that uses these GPUs, as this machine counts them."""
    if not gpu_ids:
        return {}
    shared = ranks_per_gpu()
    chosen = ",".join(str(gpu) for gpu in sorted({i // shared for i in gpu_ids}))
    visible = {visible_variable(): chosen}
    return visible if shared == 1 else visible | nccl_on_one_gpu(f"gpu-{gpu_ids[0]}")


def nccl_on_one_gpu(name: str) -> dict[str, str]:
    """Return the environment with which NCCL connects ranks of one GPU; each needs another name.

    NCCL refuses two ranks on one device of one host; its host name is replaced by `name`.
    """
    return {
        "NCCL_HOSTID": name,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    }
