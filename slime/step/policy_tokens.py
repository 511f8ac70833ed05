"""What the policy loss needs per token beyond the batch, settled over an optimizer step and all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.covariance import select_clip_cov, select_kl_cov
from slime.algorithms.off_policy import TokenLayout, weight_moments
from slime.arguments import Flags
from slime.backends.base import TrainBackend
from slime.batch.split import RankStep
from slime.catalog.policy_losses import POLICY_LOSSES, policy_loss_arg
from slime.step.policy import tis_weights
from slime.utils.types import RolloutBatch


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Lists over the samples of the rank's batch, each entry [R_i] fp32.

    Example for one sample of three response tokens, the second of them selected: PolicyTokens(old_log_probs=
    [tensor([-1.2, -0.3, -2.0])], selected=[tensor([0., 1., 0.])], tis_scale=[tensor([1.1, 1.1, 1.1])]).
    """

    old_log_probs: list[Tensor] | None  # of the policy that ratios are taken against; None: every ratio is 1
    selected: list[Tensor] | None = (
        None  # 1 where a covariance loss treats the token apart; None: another loss
    )
    tis_scale: list[Tensor] | None = None  # times the importance weights; None: these are not normalised


def policy_tokens(
    args: Flags, backend: TrainBackend, rollout_id: int, batch: RolloutBatch, step: RankStep
) -> PolicyTokens:
    """A collective: every rank calls it, also one without samples."""
    old = batch.get("rollout_log_probs") if args.use_rollout_logprobs else batch.get("log_probs")
    selected = scale = None
    if POLICY_LOSSES[args.policy_loss_type].selects_by_covariance:
        assert old is not None, "a pass before training records the old log-probs for a covariance loss"
        selected = _select_tokens(args, backend, rollout_id, batch, step, old)
    if args.tis_batch_normalize:
        scale = _tis_scale(args, backend, batch, step.positions)
    return PolicyTokens(old, selected, scale)


def _select_tokens(
    args: Flags,
    backend: TrainBackend,
    rollout_id: int,
    batch: RolloutBatch,
    step: RankStep,
    old: list[Tensor],
) -> list[Tensor]:
    positions, total = step.positions, backend.sum_over_ranks
    lists = [[values[p] for p in positions] for values in (batch["advantages"], old, batch["loss_masks"])]
    if args.policy_loss_type == "kl_cov":
        chosen = select_kl_cov(*lists, ratio=policy_loss_arg(args, "kl_cov_ratio"), total=total)
    else:
        seeds = [hash((args.seed, rollout_id, batch["sample_indices"][p])) & 0x7FFFFFFF for p in positions]
        ratio, low, high = (policy_loss_arg(args, f"clip_cov_{name}") for name in ("ratio", "low", "high"))
        chosen = select_clip_cov(*lists, ratio=ratio, low=low, high=high, seeds=seeds, total=total)
    selected = [torch.zeros(length) for length in batch["response_lengths"]]
    for position, values in zip(positions, chosen, strict=True):
        selected[position] = values
    return selected


def _tis_scale(args: Flags, backend: TrainBackend, batch: RolloutBatch, positions: list[int]) -> list[Tensor]:
    """1 / the mean importance weight over the step, whose samples of this rank are at `positions`."""
    moments = torch.zeros(2, dtype=torch.float64)
    if positions:
        ratio = torch.cat([batch["log_probs"][p] - batch["rollout_log_probs"][p] for p in positions])
        lengths = torch.tensor([batch["response_lengths"][p] for p in positions])
        segments = torch.arange(len(positions)).repeat_interleave(lengths)
        layout = TokenLayout(torch.cat([batch["loss_masks"][p] for p in positions]), segments, len(positions))
        ratio = torch.where(layout.mask != 0, ratio, torch.zeros_like(ratio))
        moments = weight_moments(tis_weights(args, ratio, layout).weights, layout, args.tis_level)
    total, count = backend.sum_over_ranks(moments).tolist()
    scale = count / total if total > 0 else 1.0
    return [torch.full((length,), scale) for length in batch["response_lengths"]]
