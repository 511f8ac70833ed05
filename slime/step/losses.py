"""The losses of a run, put together from `slime.algorithms`: policy loss, SFT loss and a user's own.

Each returns sums over a micro-batch; the backend divides by the denominators of the whole optimizer step.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.arguments import Flags
from slime.backends.base import Loss, Metrics, MicroBatch, TokenOutputs
from slime.step.policy import LossFunction, loss_reducer, policy_loss
from slime.step.preference_loss import build_dpo_loss, build_reward_model_loss
from slime.step.token_terms import TokenWatch
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


def build_loss(args: Flags, batch: RolloutBatch, watch: TokenWatch | None = None) -> Loss:
    """The loss that `--loss-type` names, over the given batch (custom losses see its per-sample lists).

    `watch` sees the per-token terms; a loss of the user's own has none that we know.
    """
    watch = watch or TokenWatch()
    if args.loss_type == "policy_loss":
        return Loss(policy_loss(args, watch), needs_entropy=True)
    if args.loss_type == "sft_loss":
        return Loss(_sft_loss(args, watch), needs_entropy=False)
    if args.loss_type == "custom_loss":
        assert args.custom_loss_function_path is not None, "parsing asks for it with --loss-type custom_loss"
        _warn_of_logits()
        if "rollout_top_p_token_ids" in batch:
            _warn_of_nucleus()
        own = _custom_loss(args, batch, args.custom_loss_function_path)
        return Loss(
            _recomputed(own) if args.recompute_loss_function else own, needs_logits=True, masked=False
        )
    if args.loss_type == "dpo_loss":
        return build_dpo_loss(batch, watch, beta=args.dpo_beta, label_smoothing=args.dpo_label_smoothing)
    if args.loss_type == "rm_loss":
        return build_reward_model_loss(batch, watch)
    raise ValueError(
        f"--loss-type is {args.loss_type!r}: choose policy_loss, sft_loss, dpo_loss, rm_loss or custom_loss."
    )


@functools.cache
def _warn_of_logits() -> None:
    """Warns of logits that a loss asks for: once in a process, not at every step."""
    logger.warning(
        "--loss-type custom_loss: full fp32 logits [tokens, vocabulary] are materialised for each "
        "micro-batch; keep --max-tokens-per-gpu small."
    )


@functools.cache
def _warn_of_nucleus() -> None:
    logger.warning(
        "--loss-type custom_loss: the samples were drawn from parts of the vocabulary, over which their "
        "recorded log-probs are; cut the logits to them (rollout_top_p_token_ids of the batch, "
        "slime.algorithms.nucleus) before you compare."
    )


def _sft_loss(args: Flags, watch: TokenWatch) -> LossFunction:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        loss = loss_reducer(args, mb)(-out.log_probs)
        watch.record(mb, {"log_probs": out.log_probs})
        return loss, {"loss": loss.detach()}

    return loss_fn


def _custom_loss(args: Flags, batch: RolloutBatch, path: str) -> LossFunction:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        assert out.logits is not None, "a loss of the user's own asks for them"
        if not mb.positions:
            return out.logits.sum() * 0.0, {}
        with plugin_call("--custom-loss-function-path", path):
            loss, metrics = load_function(path)(
                args, micro_batch_dict(batch, mb), out.logits, loss_reducer(args, mb)
            )
        return loss, {
            "loss": loss.detach(),
            **{name: torch.as_tensor(v).detach() for name, v in metrics.items()},
        }

    return loss_fn


def _recomputed(loss: LossFunction) -> LossFunction:
    """Wrap a loss so that it is computed again in the backward pass instead of keeping its intermediates."""

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        result: tuple[Tensor, Metrics] = checkpoint(loss, out, mb, use_reentrant=False)
        return result

    return loss_fn


def micro_batch_dict(batch: RolloutBatch, mb: MicroBatch) -> dict[str, Any]:
    """What a custom loss receives: the packed stream, its boundaries, and its samples' part of every list."""
    device = mb.input_ids.device
    num_samples = len(batch["tokens"])
    view: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, list) and len(value) == num_samples:
            chosen = [value[p] for p in mb.positions]
            view[key] = [x.to(device) if isinstance(x, Tensor) else x for x in chosen]
    view["unconcat_tokens"] = view.pop("tokens")
    view["tokens"] = mb.input_ids
    view["total_lengths"] = list(mb.documents.lengths)
    view["cu_seqlens"] = mb.documents.cu_seqlens
    view["max_seqlen"] = mb.documents.longest
    return view
