"""The one attention function of training: causal attention within each document of a packed stream.

It is registered with transformers under the name `slime_packed`; models are called with
`documents=PackedDocuments(...)` and pass it through to here. On CUDA with 16-bit tensors, the work is
done by the first of `flash4`, `long_attention` and torch's variable-length attention that passes a trial.
Elsewhere documents of similar length are gathered into one batch, padded on the right: under a causal mask no
real token sees the padding, so no mask tensor is needed. Sliding windows, chunks, sinks and soft-capped
scores (algorithms/attention_variants.py) are computed in such batches too, but for windows on CUDA where
torch's variable-length attention knows them. Other masks are refused by name.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from slime.algorithms.attention_variants import PLAIN, Variant, attend_to_prefix, variant_of
from slime.backends.attention import flash4, long_documents
from slime.backends.attention.attention_operator import Operator
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.trial import first_right, unobserved
from slime.utils.machine import accelerator

ATTENTION_NAME = "slime_packed"
DOCUMENTS = "_slime_documents"  # attribute of a layer: the documents of the current pass


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    *,
    scale: float | None = None,
    variant: Variant = PLAIN,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention within documents: query [T, H, D], key and value [T, G, D], H = n x G -> [T, H, D].

    With `places` (see `by_document`) they are gathered into batches in any case.
    """
    if places is None and variant is PLAIN and (operator := operator_for(query, key, value)) is not None:
        chosen = query.shape[-1] ** -0.5 if scale is None else scale
        return operator(query, key, value, documents.cu_seqlens, documents.bounds, chosen)[0]
    if places is None and takes_varlen(query, variant):
        bound, cu = documents.bound, documents.cu_seqlens
        return varlen_attention(query, key, value, cu, cu, bound, bound, scale, window=variant.window)

    def in_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _causal(q, k, v, scale) if variant is PLAIN else attend_to_prefix(q, k, v, scale, variant)

    return by_document(documents, in_batch, query, key, value, places=places)


def by_document(
    documents: PackedDocuments,
    run: Callable[..., Tensor],
    *streams: Tensor,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`run` on batches [B, L, ...] of documents instead of packed `streams` [T, ...]; its rows back in place.

    Documents are at the left of their row. The result of `run` for a token must not depend on later tokens.
    `places`: if the streams are not the documents in a row, for each token of the documents
    its place in the streams, and for each token of the streams one of its places in the documents.
    """
    if len(documents.lengths) == 1 and places is None:
        return run(*(stream[None] for stream in streams))[0]
    groups, rows = documents.groups()
    results = []
    for group in groups:
        index = group.gather.flatten()
        index = index if places is None else places[0].index_select(0, index)
        batch = (x.index_select(0, index).view(*group.gather.shape, *x.shape[1:]) for x in streams)
        results.append(run(*batch).flatten(0, 1))
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return joined.index_select(0, rows if places is None else rows.index_select(0, places[1]))


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[B, L, H, D] attention with a causal mask."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


# Operators for packed attention on CUDA, the fastest first. `prepare` stores the chosen one per (query heads
# per key head, head width): plain data, which compiled code can read.
OPERATORS: dict[str, Operator] = {
    "FlashAttention-4": flash4.attend,
    "cuDNN for long documents": long_documents.attend,
}
_CHOSEN: dict[tuple[int, int], Operator | None] = {}


def operator_for(query: Tensor, key: Tensor, value: Tensor) -> Operator | None:
    if not _fits_kernels(query) or value.shape[-1] != query.shape[-1]:
        return None
    shape = (query.shape[1] // key.shape[1], query.shape[2])
    if shape not in _CHOSEN and not torch.compiler.is_compiling():
        prepare(*shape)
    return _CHOSEN.get(shape)


def takes_varlen(query: Tensor, variant: Variant = PLAIN) -> bool:
    """Return whether `varlen_attention` can take `query`: 16 bit on CUDA, and at most a window."""
    return _fits_kernels(query) and not variant.beyond_window


def _fits_kernels(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def prepare(ratio: int, width: int) -> None:
    """Choose the attention for `ratio` query heads per key head of this width, before code is compiled."""
    if not accelerator.gpu.is_available():
        return  # documents are gathered into batches
    if (ratio, width) not in _CHOSEN:
        device = torch.device("cuda", accelerator.gpu.current_device())
        known = {name: OPERATORS[name] for name in accelerator.kind(device).attention}
        _CHOSEN[ratio, width] = unobserved(lambda: first_right(known, ratio, width, device))


def head_shape(config: Any) -> tuple[int, int]:
    """(query heads per key head, width of a head) of a transformers config."""
    values = config.get_text_config().to_dict()
    heads = values["num_attention_heads"]
    width = values.get("head_dim") or values["hidden_size"] // heads
    return heads // (values.get("num_key_value_heads") or heads), width


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float | None,
    *,
    window: int | None = None,
) -> Tensor:
    """Run torch's causal variable-length attention; with fewer queries than keys, both end together."""
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    seen = (-1 if window is None else window - 1, 0)
    bounds = (cu_query, cu_key, longest_query, longest_key)
    out = varlen_attn(query, key, value, *bounds, scale=scale, window_size=seen)
    assert isinstance(out, Tensor), "only the output was asked for"
    return out


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Entry point for transformers: query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None).

    `documents` defines which tokens see each other: PackedDocuments, or this rank's part of them.
    """
    documents = documents if documents is not None else getattr(module, DOCUMENTS, None)
    assert documents is not None, (
        "models on slime_packed attention are called with documents=PackedDocuments(...)"
    )
    if dropout:
        raise ValueError(
            f"{type(module).__name__} uses attention dropout {dropout}: set attention_dropout to 0."
        )
    variant = variant_of(module, attention_mask, kwargs)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    width = value.shape[-1]
    if width < query.shape[-1] and _fits_kernels(query):
        value = F.pad(value, (0, query.shape[-1] - width))  # kernels take one width only
    if isinstance(documents, PackedDocuments):
        out = packed_attention(query, key, value, documents, scale=scaling, variant=variant)
    else:
        out = documents.attend(query, key, value, scaling, variant)
    return out[..., :width].unsqueeze(0), None


def register() -> str:
    """Make the function known to transformers and return the name to load models with."""
    # transformers is slow to import, and the packed layout is useful without it.
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, transformers_attention)
    return ATTENTION_NAME
