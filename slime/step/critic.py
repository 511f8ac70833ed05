"""The critic's optimizer step: clipped regression of its values on the returns."""

from torch import Tensor

from slime.algorithms.reduce import reduction_weights, weighted_sum
from slime.algorithms.value_loss import compute_value_loss
from slime.backends.base import Denominators, Loss, Metrics, MicroBatch, TokenOutputs
from slime.backends.shared.microbatch import build_micro_batches
from slime.backends.shared.trainer_base import TrainBackend
from slime.batch.split import RankStep
from slime.step.step_report import optimizer_metrics
from slime.step.token_terms import TokenWatch
from slime.utils.types import RolloutBatch


def train_critic(
    backend: TrainBackend,
    batch: RolloutBatch,
    step: RankStep,
    watch: TokenWatch,
    *,
    value_clip: float,
    per_token: bool,
) -> dict[str, float]:
    """Take one optimizer step of the critic towards the returns; its metrics are `train/critic-*`."""
    tokens = {"values": batch["values"], "returns": batch["returns"]}
    mbs = build_micro_batches(batch, step.micro_batches, tokens)
    per = "tokens" if per_token else "rollouts"
    denominators = Denominators(step.num_rollouts, step.num_tokens, step.num_samples, per=per)
    stats = backend.train_step(mbs, value_loss(watch, value_clip, per_token), denominators, model="critic")
    metrics = {f"train/critic-{name}": value for name, value in stats.metrics.items()}
    return metrics | optimizer_metrics(stats, "train/critic-")


def value_loss(watch: TokenWatch, value_clip: float, per_token: bool) -> Loss:
    """Clipped value loss; the micro-batch has `values` (before the update) and `returns`."""

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        assert out.values is not None, "a critic has a head for values"
        reduction = "token_mean" if per_token else "rollout_mean"
        weights = reduction_weights(reduction, mb.loss_mask, mb.segments, mb.rollout_mask_sums)
        returns = mb.tokens["returns"]
        errors, clipped = compute_value_loss(out.values, mb.tokens["values"], returns, value_clip)
        watch.record(mb, {"values": out.values, "returns": returns, "value_loss": errors})
        loss = weighted_sum(errors, weights)
        metrics = {
            "value_loss": loss.detach(),
            "value_clipfrac": weighted_sum(clipped, weights),
            "values": weighted_sum(out.values.detach(), weights),
        }
        return loss, metrics

    return Loss(loss_fn)
