"""The loss of the critic, as the backend runs it: clipped regression of values on returns."""

from torch import Tensor

from slime.algorithms.reduce import token_weights, weighted_sum
from slime.algorithms.value_loss import compute_value_loss
from slime.arguments import Args
from slime.backends.base import Loss, Metrics, MicroBatch, TokenOutputs
from slime.step.watch import TokenWatch


def build_value_loss(args: Args, watch: TokenWatch) -> Loss:
    """Needs `values` (those before the update) and `returns` among the micro-batch's tokens."""

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        per_token = args.calculate_per_token_loss
        weights = token_weights(mb.loss_mask, mb.segments, mb.rollout_mask_sums, per_token=per_token)
        errors, clipped = compute_value_loss(
            out.values, mb.tokens["values"], mb.tokens["returns"], args.value_clip
        )
        watch.record(mb, {"values": out.values, "returns": mb.tokens["returns"], "value_loss": errors})
        loss = weighted_sum(errors, weights)
        metrics = {
            "value_loss": loss.detach(),
            "value_clipfrac": weighted_sum(clipped, weights),
            "values": weighted_sum(out.values.detach(), weights),
        }
        return loss, metrics

    return Loss(loss_fn)
