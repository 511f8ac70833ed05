"""Process groups whose ranks live in programs of their own: a trainer rank and engines, which share no default group."""

from __future__ import annotations

import datetime

import torch.distributed as dist


def group_beside_the_default(
    store: dist.Store, rank: int, world_size: int, backend: str, name: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Joins the group `name` as `rank`; returns when all `world_size` ranks have met at the store.

    `new_group` only splits the default group, so this takes the step below it, as SGLang does on its side; names and
    prefixes must be those it uses.
    """
    # Private parts of torch, checked on 2.11 and 2.13; imported here so that nothing else depends on them.
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
