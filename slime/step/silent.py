"""Skips the backward pass of samples without a learning signal.

A group whose responses are all right, or all wrong, has zero advantages. Its tokens count in every metric and
denominator, and their gradient is exactly 0, so they get only a forward pass, in separate micro-batches.
"""

from collections.abc import Sequence

import torch

from slime.arguments import Flags
from slime.backends.base import Layout
from slime.batch.flops import sample_sizes
from slime.batch.packing import pack_first_fit
from slime.catalog.backends import BACKENDS
from slime.catalog.policy_losses import POLICY_LOSSES
from slime.utils.types import RolloutBatch

# User functions, which may give any token a gradient.
_OWN = (
    "custom_policy_loss_function_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
)


def set_apart(
    args: Flags, layout: Layout, batch: RolloutBatch, micro_batches: list[list[int]]
) -> tuple[list[list[int]], list[bool]]:
    """Regroup the samples into micro-batches with and without a gradient, none larger than the largest.

    If no sample learns, all get a backward pass: the optimizer's moments need a gradient of 0, not none.
    """
    everything = micro_batches, [True] * len(micro_batches)
    if not _can_skip_backward(args, layout):
        return everything
    learns = _learning(batch)
    if len({learns[p] for members in micro_batches for p in members}) < 2:
        return everything
    if not args.use_dynamic_batch_size:
        return micro_batches, [any(learns[p] for p in members) for members in micro_batches]
    sizes = sample_sizes(batch)
    cap = max(sum(sizes[p] for p in members) for members in micro_batches)
    made: list[list[int]] = []
    counts = []
    for wanted in (True, False):
        parts = [[p for p in members if learns[p] == wanted] for members in micro_batches]
        joined = _join([part for part in parts if part], sizes, cap)
        made += joined
        counts += [wanted] * len(joined)
    return made, counts


def _can_skip_backward(args: Flags, layout: Layout) -> bool:
    """Return whether zero advantages imply zero loss, and no other rank waits for a backward pass."""
    alone = layout.dp_size == layout.cp_size == layout.tp_size == layout.pp_size == 1
    plain = args.loss_type == "policy_loss" and not (args.entropy_coef or args.use_kl_loss or args.use_opd)
    return (
        alone
        and plain
        and BACKENDS[args.train_backend].skips_backward
        and POLICY_LOSSES[args.policy_loss_type].scales_with_advantage
        and not any(getattr(args, name) for name in _OWN)
    )


def _learning(batch: RolloutBatch) -> list[bool]:
    """Return for each sample whether some trained token has a nonzero advantage."""
    counted = torch.cat(batch["advantages"]).mul(torch.cat(batch["loss_masks"])) != 0
    so_far = torch.cat((torch.zeros(1, dtype=torch.int64), counted.cumsum(0)))
    ends = torch.tensor(batch["response_lengths"]).cumsum(0)
    return torch.diff(so_far[ends], prepend=torch.zeros(1, dtype=torch.int64)).bool().tolist()


def _join(parts: list[list[int]], sizes: Sequence[int], cap: int) -> list[list[int]]:
    bins = pack_first_fit([sum(sizes[p] for p in part) for part in parts], cap)
    return [[p for i in members for p in parts[i]] for members in bins]
