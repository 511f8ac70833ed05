"""Handles the ids that each token was drawn from (its nucleus), as responses and samples contain them.

`ids` of all tokens are concatenated; those of token i are `ids[offsets[i]:offsets[i + 1]]`. A token without
ids was drawn from the whole vocabulary, or is tool output. An engine's log-probs are over the ids if there
are any, else over the whole vocabulary. SGLang reports both in fields of its own, see `in_our_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.misc import decode_int32_meta_array, encode_int32_meta_array

if TYPE_CHECKING:
    from torch import Tensor

# The field of a request, inside its sampling_params["custom_params"].
REQUEST_FIELD = "return_top_p_token_ids"
# The fields of a response's meta_info; the second names are those of older servers.
_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
# The fields in which SGLang reports them: the ids of each token, and its log-prob over them.
_MASKS, _MASKED_LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"


def to_meta(kept: Sequence[np.ndarray]) -> dict[str, str]:
    """Return the fields of a response from the ids of each token."""
    offsets = np.cumsum([0, *(len(ids) for ids in kept)])
    ids = np.concatenate(kept) if kept else np.zeros(0)
    return {_IDS[0]: encode_int32_meta_array(ids), _OFFSETS[0]: encode_int32_meta_array(offsets)}


def in_our_fields(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a response's meta_info with SGLang's report in the fields of the embedded engine.

    SGLang's `output_token_logprobs` are over the whole vocabulary; they become those over the kept ids.
    """
    masks = meta.get(_MASKS)
    if masks is None:
        return meta
    triples = meta.get("output_token_logprobs") or ()
    log_probs = [[own, *rest] for own, (_, *rest) in zip(meta[_MASKED_LOG_PROBS], triples, strict=True)]
    others = {name: value for name, value in meta.items() if name not in (_MASKS, _MASKED_LOG_PROBS)}
    return others | {"output_token_logprobs": log_probs} | to_meta([np.asarray(row) for row in masks])


def is_in(meta: Mapping[str, Any]) -> bool:
    """Return whether a response names the ids that its tokens were drawn from."""
    return bool(meta.get(_IDS[0]) or meta.get(_MASKS))


def from_meta(meta: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return (ids, offsets) of a response, int32; None: it has neither. ValueError: it has only one."""
    meta = in_our_fields(meta)
    found = [meta[name] for names in (_IDS, _OFFSETS) for name in names if meta.get(name) is not None]
    if not found:
        return None
    if len(found) != 2:
        raise ValueError(f"{_IDS[0]} and {_OFFSETS[0]} belong together; the response has only one of them")
    import torch  # only responses with such ids need it

    ids, offsets = (torch.from_numpy(decode_int32_meta_array(value).copy()) for value in found)
    return ids, offsets


def wrong_with(ids: Any, offsets: Any, tokens: Sequence[int], vocab_size: int | None = None) -> str | None:
    """Return why these cannot be the ids that `tokens` were drawn from; None: they can."""
    ids, offsets = (np.asarray(values, dtype=np.int64).reshape(-1) for values in (ids, offsets))
    if len(offsets) != len(tokens) + 1:
        return f"{len(offsets)} top-p offsets for {len(tokens)} tokens, there must be one more"
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(ids) or (counts < 0).any():
        return f"top-p offsets that do not run from 0 to the number of ids, {len(ids)}"
    if len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        return f"top-p id {ids.min() if ids.min() < 0 else ids.max()} in a vocabulary of {vocab_size}"
    row_of = np.repeat(np.arange(len(tokens)), counts)
    own = ids == np.repeat(np.asarray(tokens, dtype=np.int64), counts)
    lost = np.flatnonzero((np.bincount(row_of[own], minlength=len(tokens)) == 0) & (counts > 0))
    return f"token {tokens[lost[0]]} at {lost[0]} is not among its top-p ids" if len(lost) else None


def joined(ids: Any, offsets: Any, more_ids: Any, more_offsets: Any) -> tuple[Tensor, Tensor]:
    """Append the ids of later tokens; int32."""
    import torch  # as above

    ids, offsets, more_ids, more_offsets = (
        torch.as_tensor(part, dtype=torch.int32).reshape(-1)
        for part in (ids, offsets, more_ids, more_offsets)
    )
    return torch.cat([ids, more_ids]), torch.cat([offsets, more_offsets[1:] + offsets[-1]])
