"""Chooses by patterns over hub names which parameters train; a fused matrix trains or stays as a whole."""

import re
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from slime.arguments import Args
from slime.backends.megatron.weights import ParameterEntry


def freeze(args: Args, entries: Sequence[ParameterEntry]) -> None:
    """Freeze the parameters that the two flags leave out or name; before the optimizer is built."""
    only = args.only_train_params_name_list
    patterns = only or args.freeze_params_name_list
    if not patterns:
        return
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    entries = [entry for entry in entries if isinstance(entry.parameter, nn.Parameter)]  # no buffer trains
    _check_patterns(flag, patterns, entries)
    trains = [_matches(flag, patterns, entry) == bool(only) for entry in entries]
    everywhere: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, any(trains))
    if not any(everywhere):
        raise ValueError(f"{flag} freezes every parameter: nothing would train.")
    for entry, kept in zip(entries, trains, strict=True):
        entry.parameter.requires_grad_(kept)


def _matches(flag: str, patterns: Iterable[str], entry: ParameterEntry) -> bool:
    found = {name: any(re.search(pattern, name) for pattern in patterns) for name in entry.hub}
    if len(set(found.values())) > 1:
        inside = next(name for name, matched in found.items() if matched)
        outside = next(name for name, matched in found.items() if not matched)
        raise ValueError(
            f"{flag} matches {inside} but not {outside}: Megatron keeps both in one matrix, which trains or "
            "stays as a whole; name both (or use --train-backend fsdp)."
        )
    return next(iter(found.values()))


def _check_patterns(flag: str, patterns: Iterable[str], entries: Sequence[ParameterEntry]) -> None:
    """A pattern must match a name on some rank; every rank refuses the same one."""
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, [name for entry in entries for name in entry.hub])
    known = [name for rank in names for name in rank]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in known):
            raise ValueError(
                f"{flag}: {pattern!r} matches no parameter; names look like {known[len(known) // 2]}."
            )
