"""Creates the process group of one rank that trainers need where nothing else is distributed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from slime.utils.machine.process_groups import stay_on_loopback


@contextmanager
def alone() -> Iterator[None]:
    """Create a process group of one rank, unless there is a group."""
    if dist.is_initialized():
        yield
        return
    stay_on_loopback()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
