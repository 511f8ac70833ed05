"""Losses over preference pairs: DPO on a policy, Bradley-Terry on a scalar head.

The two responses of a pair share a rollout id, and the schedule keeps them in one micro-batch. The preferred
response has the larger reward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slime.algorithms.preference import compute_bradley_terry_loss, compute_dpo_loss
from slime.algorithms.reduce import segment_sum
from slime.backends.base import Loss, Metrics, MicroBatch, TokenOutputs
from slime.step.policy import LossFunction
from slime.step.token_terms import TokenWatch
from slime.utils.types import RolloutBatch

PairFunction = Callable[[TokenOutputs, MicroBatch, Tensor, Tensor], tuple[Tensor, Metrics]]


def build_dpo_loss(batch: RolloutBatch, watch: TokenWatch, *, beta: float) -> Loss:
    """Build the DPO loss; the micro-batch has `ref_log_probs`."""

    def pair_loss(
        out: TokenOutputs, mb: MicroBatch, chosen: Tensor, rejected: Tensor
    ) -> tuple[Tensor, Metrics]:
        watch.record(mb, {"log_probs": out.log_probs, "ref_log_probs": mb.tokens["ref_log_probs"]})
        policy = segment_sum(out.log_probs * mb.loss_mask, mb.segments, mb.num_samples)
        reference = segment_sum(mb.tokens["ref_log_probs"] * mb.loss_mask, mb.segments, mb.num_samples)
        pairs = policy[chosen], policy[rejected], reference[chosen], reference[rejected]
        loss, good, bad = compute_dpo_loss(*pairs, beta)
        metrics = _pair_metrics(loss, good, bad)
        return loss.sum(), metrics | {
            "chosen_log_probs": policy[chosen].sum(),
            "rejected_log_probs": policy[rejected].sum(),
        }

    return Loss(_over_pairs(batch, pair_loss))


def build_reward_model_loss(batch: RolloutBatch, watch: TokenWatch) -> Loss:
    """Build the Bradley-Terry loss; a pair's train metadata may have a margin of scores."""
    metadata = batch.get("metadata") or [None] * len(batch["tokens"])

    def pair_loss(
        out: TokenOutputs, mb: MicroBatch, chosen: Tensor, rejected: Tensor
    ) -> tuple[Tensor, Metrics]:
        assert out.values is not None, "a reward model has a head for scores"
        watch.record(mb, {"values": out.values})
        # The score of a response is the head's output at its last token.
        last = torch.tensor(mb.response_lengths, device=out.values.device).cumsum(0) - 1
        scores = out.values[last]
        pairs = [metadata[mb.positions[i]] or {} for i in chosen.tolist()]
        margins = torch.tensor([float(pair.get("margin") or 0.0) for pair in pairs]).to(scores)
        loss = compute_bradley_terry_loss(scores[chosen], scores[rejected], margins)
        return loss.sum(), _pair_metrics(loss, scores[chosen].detach(), scores[rejected].detach())

    return Loss(_over_pairs(batch, pair_loss), masked=False)


def _pair_metrics(loss: Tensor, chosen: Tensor, rejected: Tensor) -> Metrics:
    return {
        "loss": loss.sum(),
        "accuracy": (chosen > rejected).to(chosen.dtype).sum(),
        "margin": (chosen - rejected).sum(),
        "chosen_rewards": chosen.sum(),
        "rejected_rewards": rejected.sum(),
    }


def _over_pairs(batch: RolloutBatch, pair_loss: PairFunction) -> LossFunction:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        chosen, rejected = find_pairs(batch, mb.positions)
        device = mb.loss_mask.device
        loss, metrics = pair_loss(out, mb, chosen.to(device), rejected.to(device))
        # A micro-batch of weight zero has no pair; its loss uses the parameters so that all ranks reduce.
        outputs = out.values if out.values is not None else out.log_probs
        return loss + 0.0 * outputs.sum(), {name: value.detach() for name, value in metrics.items()}

    return loss_fn


def find_pairs(batch: RolloutBatch, positions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the places in the micro-batch of the preferred and the rejected responses [P], pair by pair."""
    members: dict[int, list[int]] = {}
    for place, position in enumerate(positions):
        members.setdefault(batch["rollout_ids"][position], []).append(place)
    chosen, rejected = [], []
    for rollout_id, places in members.items():
        rewards = [batch["raw_reward"][positions[place]] for place in places]
        if len(places) != 2 or rewards[0] == rewards[1]:
            raise ValueError(
                f"the samples with rollout id {rollout_id} are no pair (rewards {rewards}): a preference "
                "loss needs two responses with one rollout_id, the preferred with the larger reward; use "
                "--rollout-function-path slime.rollout.preference_rollout.generate_rollout."
            )
        best = 0 if rewards[0] > rewards[1] else 1
        chosen.append(places[best])
        rejected.append(places[1 - best])
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(rejected, dtype=torch.int64)
