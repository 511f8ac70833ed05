"""Splits a batch into optimizer steps, ranks and micro-batches, by lengths and ids of its samples.

Steps split on rollout ids: the fan-out siblings of one rollout never straddle two steps. Every rank gets the
same number of micro-batches in a step; a rank with too few samples gets empty micro-batches, which have
weight zero.
"""

import itertools
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from slime.arguments import Flags
from slime.arguments.groups.objectives import CRITIC, PAIR_LOSSES
from slime.batch.flops import sample_sizes, typical_cost
from slime.batch.packing import balance, pack_first_fit, split_largest
from slime.catalog.backends import BACKENDS
from slime.utils import codec
from slime.utils.stored_arrays import StoredArray
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

_UNITS_PER_RANK = 4  # at least, so that ranks can get similar amounts of work


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: `ranks[r]` is rank r's list of micro-batches, each a list of sample positions.

    Example with 2 ranks and samples 0..4: ranks=[[[0, 3], [4]], [[1, 2], []]]; the empty list is a
    micro-batch of weight zero that keeps the ranks in step.
    """

    ranks: list[list[list[int]]]
    num_rollouts: int

    @property
    def positions(self) -> list[int]:
        return sorted(p for rank in self.ranks for micro_batch in rank for p in micro_batch)


@dataclass(frozen=True, slots=True)
class RankStep:
    """One optimizer step as one rank sees it; the counts are of the whole step over all ranks."""

    micro_batches: list[list[int]]  # positions in this rank's batch; [] is a micro-batch of weight zero
    num_rollouts: int
    num_tokens: float  # trained tokens (mask total)
    num_samples: int = 0

    @property
    def positions(self) -> list[int]:
        """Return the positions in the batch of all samples that this rank has in the step."""
        return [position for micro_batch in self.micro_batches for position in micro_batch]


@dataclass(frozen=True, slots=True)
class RankData:
    """Everything one data-parallel rank needs to train on one rollout."""

    batch: RolloutBatch
    steps: list[RankStep]

    @property
    def micro_batches(self) -> list[list[int]]:
        """Return the micro-batches of all steps, which passes before training use, too."""
        return [micro_batch for step in self.steps for micro_batch in step.micro_batches]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for the rank's process, with the whole batch as one block of bytes."""
        try:
            batch = codec.encode(codec.with_rows(self.batch))
        except codec.ForeignValue:  # a user's function may put any object into a batch
            return _received, (self.batch, self.steps)
        return _received, (batch, self.steps)


def _received(batch: bytes | RolloutBatch, steps: list[RankStep]) -> RankData:
    """Return the share in the process of its rank, which reads the arrays that the driver never had."""
    own: dict[str, Any] = codec.decode(batch) if isinstance(batch, bytes) else dict(batch)
    for key, values in own.items():
        if isinstance(values, list) and any(isinstance(value, StoredArray) for value in values):
            own[key] = [torch.from_numpy(v.load()) if isinstance(v, StoredArray) else v for v in values]
    return RankData(cast(RolloutBatch, own), steps)


def plan_steps(
    args: Flags,
    batch_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    dp_size: int,
    cp_size: int = 1,
    prompts: Sequence[Hashable] | None = None,
    prompt_sizes: Sequence[int] | None = None,
) -> list[StepPlan]:
    """Split samples into steps of `--global-batch-size` rollouts, and each step into equally many
    micro-batches.

    `prompts`: one key per sample; samples with the same key stay together if a micro-batch can hold them.
    `prompt_sizes`: tokens of each sample's prompt; samples that stay together count a shared prompt once.

    A last step with fewer rollouts is kept and has its own, smaller count: nothing is dropped.
    """
    members: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        members.setdefault(rollout_id, []).append(position)
    rollouts = list(members.values())
    size = args.global_batch_size or len(rollouts)
    steps = []
    for start in range(0, len(rollouts), size):
        chosen = rollouts[start : start + size]
        # Units that are never split over micro-batches: a sample, or both responses of a preference pair.
        units = chosen if args.loss_type in PAIR_LOSSES else [[p] for rollout in chosen for p in rollout]
        if prompts is not None:
            positions = [p for unit in units for p in unit]
            budget = _token_budget(args, cp_size)
            units = _siblings(positions, prompts, batch_lengths, prompt_sizes, budget, dp_size)
        ranks = _split_step(args, units, batch_lengths, prompt_sizes, dp_size, cp_size)
        steps.append(StepPlan(ranks=ranks, num_rollouts=len(chosen)))
    if len(rollouts) % size:
        logger.warning(
            "%d rollouts are not a multiple of --global-batch-size %d: the last of %d optimizer steps has "
            "%d rollouts.",
            len(rollouts),
            size,
            len(steps),
            len(rollouts) % size,
        )
    return steps


def _unit_size(unit: Sequence[int], lengths: Sequence[int], prompt_sizes: Sequence[int] | None) -> int:
    """Return the tokens of samples that stay together; `prompt_sizes`: their common prompt counts once."""
    repeated = (len(unit) - 1) * prompt_sizes[unit[0]] if prompt_sizes is not None else 0
    return sum(lengths[p] for p in unit) - repeated


def _siblings(
    positions: list[int],
    prompts: Sequence[Hashable],
    lengths: Sequence[int],
    prompt_sizes: Sequence[int] | None,
    budget: int,
    dp_size: int,
) -> list[list[int]]:
    """Group samples of one prompt so that they fit a micro-batch, in runs short enough to balance ranks."""
    most = len(positions) if dp_size == 1 else max(1, len(positions) // (_UNITS_PER_RANK * dp_size))
    families: dict[Hashable, list[int]] = {}
    for position in positions:
        families.setdefault(prompts[position], []).append(position)
    units: list[list[int]] = []
    for family in families.values():
        unit: list[int] = []
        size = 0  # of the unit
        prompt = 0 if prompt_sizes is None else prompt_sizes[family[0]]  # which counts once
        for position in family:
            if unit and (len(unit) == most or size + lengths[position] - prompt > budget):
                units.append(unit)
                unit, size = [], 0
            size += lengths[position] - (prompt if unit else 0)
            unit.append(position)
        units.append(unit)
    return units


def _split_step(
    args: Flags,
    units: list[list[int]],
    lengths: Sequence[int],
    prompt_sizes: Sequence[int] | None,
    dp_size: int,
    cp_size: int,
) -> list[list[list[int]]]:
    sizes = [_unit_size(unit, lengths, prompt_sizes) for unit in units]
    costs = [sum(typical_cost(lengths[p]) for p in unit) for unit in units]
    balances, cap = args.balance_data or args.balance_by_flops, _token_budget(args, cp_size)
    shares = balance(costs, dp_size) if balances else [list(range(len(units)))]
    samples = max(1, args.micro_batch_size // len(units[0]))
    packed = [_pack(share, sizes, cap, samples) for share in shares]
    longest = max(len(bins) for bins in packed)
    target = longest if balances else -(-longest // dp_size) * dp_size
    if balances or cap:
        packed = [split_largest(bins, sizes, target) for bins in packed]
    if cap:
        works = costs if args.balance_by_flops else sizes
        packed = [_even_bins(bins, works, sizes, cap) for bins in packed]
    if balances:
        # Ranks wait for each other at every micro-batch, so micro-batches of similar cost are run together.
        ranks = [sorted(bins, key=lambda members: -sum(costs[unit] for unit in members)) for bins in packed]
    else:
        ranks = [packed[0][rank::dp_size] for rank in range(dp_size)]
    count = max(len(bins) for bins in ranks)
    # Sorted by length within a micro-batch, so that attention gets short documents in one run.
    ordered = [[sorted(members, key=lambda unit: sizes[unit]) for members in bins] for bins in ranks]
    as_positions = [[[p for unit in members for p in units[unit]] for members in bins] for bins in ordered]
    return [bins + [[] for _ in range(count - len(bins))] for bins in as_positions]


def _even_bins(
    bins: list[list[int]], costs: Sequence[float], sizes: Sequence[int], cap: int
) -> list[list[int]]:
    """Spread the units over bins of nearly equal cost; keep `bins` if one would exceed `cap` tokens.

    Bins filled one after another may leave a single short sample in the last one, a micro-batch whose kernels
    take less time than their launch.
    """
    units = [unit for members in bins for unit in members]
    parts = balance([costs[unit] for unit in units], len(bins)) if bins else []
    even = [[units[i] for i in part] for part in parts]
    fits = all(len(part) == 1 or sum(sizes[unit] for unit in part) <= cap for part in even)
    return even if fits and all(even) else bins


def _pack(units: list[int], sizes: Sequence[int], cap: int, samples: int) -> list[list[int]]:
    """Pack units into bins of up to `cap` tokens, or, if `cap` is 0, of `samples` units."""
    if cap:
        bins = pack_first_fit([sizes[unit] for unit in units], cap)
        return [[units[i] for i in members] for members in bins]
    return [units[start : start + samples] for start in range(0, len(units), samples)]


def _token_budget(args: Flags, cp_size: int) -> int:
    """Return the tokens of a micro-batch over the ranks of a replica; 0: it is filled by samples."""
    if not args.use_dynamic_batch_size:
        return 0
    assert args.max_tokens_per_gpu is not None, "rules derive it"
    return args.max_tokens_per_gpu * cp_size


def take(batch: RolloutBatch, positions: Sequence[int]) -> RolloutBatch:
    """Select the samples at `positions` in every per-sample key; other keys are kept whole."""
    num_samples = len(batch["tokens"])
    taken: dict[str, Any] = {}
    values: Mapping[str, Any] = batch
    for key, value in values.items():
        if isinstance(value, (list, tuple)) and len(value) == num_samples:
            taken[key] = [value[p] for p in positions]
        elif hasattr(value, "shape") and len(value.shape) > 0 and value.shape[0] == num_samples:
            taken[key] = value[list(positions)]
        else:
            taken[key] = value
    return cast(RolloutBatch, taken)  # the keys of `batch`, which the checker cannot follow in a loop


def split_for_ranks(
    args: Flags,
    batch: RolloutBatch,
    dp_size: int,
    *,
    cp_size: int = 1,
) -> list[RankData]:
    """Return each data-parallel rank's own samples and steps."""
    lengths = sample_sizes(batch)
    prompts = _prompts(batch) if _keeps_siblings(args) else None
    once = prompts is not None and _counts_prompts_once(args)
    response_lengths = batch["response_lengths"]
    plans = plan_steps(
        args,
        lengths,
        batch["rollout_ids"],
        dp_size=dp_size,
        cp_size=cp_size,
        prompts=prompts,
        prompt_sizes=[n - r for n, r in zip(lengths, response_lengths, strict=True)] if once else None,
    )
    mask_totals = [float(sum(mask.tolist())) for mask in batch["loss_masks"]]
    shares: list[RankData] = []
    for rank in range(dp_size):
        own = [p for step in plans for micro_batch in step.ranks[rank] for p in micro_batch]
        local = {position: i for i, position in enumerate(own)}
        steps = [
            RankStep(
                micro_batches=[[local[p] for p in micro_batch] for micro_batch in step.ranks[rank]],
                num_rollouts=step.num_rollouts,
                num_tokens=sum(mask_totals[p] for p in step.positions),
                num_samples=len(step.positions),
            )
            for step in plans
        ]
        shares.append(RankData(batch=take(batch, own), steps=steps))
    return shares


def _keeps_siblings(args: Flags) -> bool:
    """Return whether samples of one prompt should share a micro-batch, which computes the prompt once."""
    shares = BACKENDS[args.train_backend].shares_prompts and args.share_prefix is not False
    shares = shares and args.context_parallel_size == 1
    return shares and bool(args.use_dynamic_batch_size) and args.loss_type not in PAIR_LOSSES


def _counts_prompts_once(args: Flags) -> bool:
    """Return whether a shared prompt counts once: not if some pass of the run needs every sample whole."""
    needs_all = CRITIC.works(args) or args.loss_type == "custom_loss"
    return args.share_prefix is True and not needs_all


def _prompts(batch: RolloutBatch) -> list[Hashable]:
    """Return a key for each sample that is the same for samples with the same prompt."""
    joined = torch.cat(batch["tokens"]).numpy()  # at once: one torch call per sample takes longer
    data, size = joined.tobytes(), joined.itemsize
    lengths = [tokens.numel() for tokens in batch["tokens"]]
    rows = zip(itertools.accumulate(lengths), lengths, batch["response_lengths"], strict=True)
    return [data[size * (end - length) : size * (end - response)] for end, length, response in rows]
