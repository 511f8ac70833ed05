"""Assembles the losses of a run from `slime.algorithms`: policy loss, SFT loss and custom losses.

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


def build_loss(args: Flags, batch: RolloutBatch, watch: TokenWatch) -> Loss:
    """The loss that `--loss-type` names, over the given batch (custom losses see its per-sample lists).

    `watch` gets the per-token terms; those of a user's own loss are unknown.
    """
    if args.loss_type == "policy_loss":
        return Loss(policy_loss(args, watch), needs_entropy=True)
    if args.loss_type == "sft_loss":
        return Loss(_sft_loss(args, watch), needs_entropy=False)
    if args.loss_type == "custom_loss":
        assert args.custom_loss_function_path is not None, "parsing asks for it with --loss-type custom_loss"
        _warn_once(
            "full fp32 logits [tokens, vocabulary] are materialised for each micro-batch; keep "
            "--max-tokens-per-gpu small."
        )
        if "rollout_top_p_token_ids" in batch:
            _warn_once(
                "the samples were drawn from parts of the vocabulary, over which their recorded log-probs "
                "are; cut the logits to them (rollout_top_p_token_ids, slime.algorithms.nucleus) before you "
                "compare."
            )
        own = _custom_loss(args, batch, args.custom_loss_function_path)
        own = _recomputed(own) if args.recompute_loss_function else own
        return Loss(own, needs_logits=True, masked=False)
    if args.loss_type == "dpo_loss":
        return build_dpo_loss(batch, watch, beta=args.dpo_beta)
    if args.loss_type == "rm_loss":
        return build_reward_model_loss(batch, watch)
    raise AssertionError(f"parsing refuses --loss-type {args.loss_type!r}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("--loss-type custom_loss: %s", text)


def _sft_loss(args: Flags, watch: TokenWatch) -> LossFunction:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        loss = loss_reducer(args, mb)(-out.log_probs)
        watch.record(mb, {"log_probs": out.log_probs})
        return loss, {"loss": loss.detach()}

    return loss_fn


def _custom_loss(args: Flags, batch: RolloutBatch, path: str) -> LossFunction:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        assert out.logits is not None, "a custom loss requires them"
        if not mb.positions:
            return out.logits.sum() * 0.0, {}
        inputs = args, micro_batch_dict(batch, mb), out.logits, loss_reducer(args, mb)
        with plugin_call("--custom-loss-function-path", path):
            loss, metrics = load_function(path)(*inputs)
        detached = {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
        return loss, {"loss": loss.detach(), **detached}

    return loss_fn


def _recomputed(loss: LossFunction) -> LossFunction:
    """Wrap a loss so that it is computed again in the backward pass instead of keeping its intermediates."""

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        result: tuple[Tensor, Metrics] = checkpoint(loss, out, mb, use_reentrant=False)
        return result

    return loss_fn


def micro_batch_dict(batch: RolloutBatch, mb: MicroBatch) -> dict[str, Any]:
    """Return the batch of a custom loss: the packed stream, its boundaries, and per-sample lists."""
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
