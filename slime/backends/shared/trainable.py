"""Chooses by patterns over hub names which parameters train; a fused matrix trains or stays as a whole."""

import re
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from slime.arguments import Args

Named = Sequence[tuple[tuple[str, ...], Tensor]]  # this rank's parameters, and the hub names in each


def freeze(args: Args, named: Named) -> None:
    """Freeze the parameters that the two flags exclude; called before the optimizer is built."""
    only = args.only_train_params_name_list
    patterns = only or args.freeze_params_name_list
    if not patterns:
        return
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    _check_patterns(flag, patterns, named)
    # What never trains, such as an indexer, stays frozen.
    trains = [
        tensor.requires_grad and _matches(flag, patterns, names) == bool(only) for names, tensor in named
    ]
    everywhere: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, any(trains))
    if not any(everywhere):
        raise ValueError(f"{flag} freezes every parameter: nothing would train.")
    for (_, parameter), kept in zip(named, trains, strict=True):
        parameter.requires_grad_(kept)


def _matches(flag: str, patterns: Sequence[str], names: tuple[str, ...]) -> bool:
    found = {name: any(re.search(pattern, name) for pattern in patterns) for name in names}
    inside, outside = ([name for name in names if found[name] is matched] for matched in (True, False))
    if inside and outside:
        raise ValueError(
            f"{flag} matches {inside[0]} but not {outside[0]}: Megatron keeps both in one matrix, which "
            "trains or stays as a whole; name both (or use --train-backend fsdp)."
        )
    return bool(inside)


def _check_patterns(flag: str, patterns: Sequence[str], named: Named) -> None:
    """Require that each pattern matches a name on some rank; every rank refuses the same one."""
    own: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(own, [name for names, _ in named for name in names])
    known = [name for names in own for name in names]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in known):
            raise ValueError(
                f"{flag}: {pattern!r} matches no parameter; names look like {known[len(known) // 2]}."
            )
