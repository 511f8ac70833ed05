"""Log-probs of responses out of packed logits, for losses of the user's own (`--custom-loss-function-path`).

Plug-ins call these functions, so names and signatures are stable. A loss gets the whole vocabulary on every
rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.logprobs import calculate_log_probs_and_entropy


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
    **kwargs: Any,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each sample the logits [R, V] that predict its response, and its response tokens [R].

    `logits` [1, T, V] hold the samples one after another; they are divided by --rollout-temperature.
    """
    del kwargs
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise ValueError(f"get_responses: logits have the shape {tuple(logits.shape)}, expected [1, T, V].")
    if sum(total_lengths) > logits.shape[1]:
        raise ValueError(
            f"get_responses: the samples have {sum(total_lengths)} tokens, but the logits {logits.shape[1]}."
        )
    rows = logits[0]
    if apply_temperature and args.rollout_temperature != 1.0:
        rows = rows / args.rollout_temperature
    end = 0
    for tokens, total, length in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        yield rows[end - length - 1 : end - 1], tokens[total - length : total]


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor, and `log_probs` (with `with_entropy` also `entropy`) as one [R] per sample.

    With the ids that sampling kept (`get_rollout_top_p_logprob_kwargs`), log-probs are over these alone.
    """
    del non_loss_data, kwargs
    found: dict[str, list[Tensor]] = {name: [] for name in ("log_probs", "entropy")[: 1 + with_entropy]}
    samples: dict[str, Any] = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    responses = get_responses(logits, args=args, unconcat_tokens=unconcat_tokens, **samples)
    chunk_size = getattr(args, "log_probs_chunk_size", None) or -1
    for position, (rows, tokens) in enumerate(responses):
        keep = None
        if top_p_token_ids is not None and top_p_token_offsets is not None:
            keep = _kept(rows, top_p_token_ids[position], top_p_token_offsets[position])
        log_probs, entropy = calculate_log_probs_and_entropy(
            rows, tokens, None, with_entropy=with_entropy, chunk_size=chunk_size, log_prob_keep_mask=keep
        )
        found["log_probs"].append(log_probs.squeeze(-1))
        if entropy is not None:
            found["entropy"].append(entropy)
    return logits.new_empty(0), found


def get_rollout_top_p_logprob_kwargs(args: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `get_log_probs_and_entropy` for a batch sampled with top-p or top-k."""
    if getattr(args, "rollout_top_p", 1.0) == 1.0:
        return {}
    names = {name: f"rollout_{name}" for name in ("top_p_token_ids", "top_p_token_offsets")}
    missing = [key for key in names.values() if batch.get(key) is None]
    if missing:
        raise ValueError(f"--rollout-top-p is {args.rollout_top_p:g}, but the batch has no {missing[0]}.")
    return {name: batch[key] for name, key in names.items()}


def _kept(rows: Tensor, ids: Any, offsets: Any) -> Tensor:
    """Return [R, V]: the ids that each row's token could be; all of them for a row without recorded ids."""
    ids, bounds = torch.as_tensor(ids).long().cpu(), torch.as_tensor(offsets).long().cpu()
    counts = bounds.diff()
    keep = torch.zeros(rows.shape, dtype=torch.bool)
    keep[torch.repeat_interleave(torch.arange(len(counts)), counts), ids] = True
    keep[counts == 0] = True
    return keep.to(rows.device)
