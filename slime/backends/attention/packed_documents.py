"""The one attention function of training: causal attention within each document of a packed stream.

It is registered with transformers under the name `slime_packed`; models are called with
`documents=PackedDocuments(...)` and pass it through to here. On CUDA with 16-bit tensors, the work is
done by the first of `flash4`, `long_attention` and torch's variable-length attention that passes a trial.
Elsewhere documents of similar length are gathered into one batch, padded on the right: under a causal mask no
real token sees the padding, so no mask tensor is needed. Sliding windows, chunks, sinks and soft-capped
scores (algorithms/attention_variants.py) are computed in such batches too, but for windows on CUDA where
torch's variable-length attention knows them. Other masks are refused by name.
"""

import functools
import inspect
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
from slime.backends.attention.short_products import attend_with_mask
from slime.backends.attention.trial import first_right, unobserved

ATTENTION_NAME = "slime_packed"
DOCUMENTS = "_slime_documents"  # attribute of a layer: the documents of the pass that runs

# On a CPU, documents up to this length use plain matrix products: torch's kernel works in larger blocks.
_SHORT = 64


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
    if places is None and (attend := varlen_for(query, variant)) is not None:
        bound, cu = documents.bound, documents.cu_seqlens
        return attend(query, key, value, cu, cu, bound, bound, scale, window=variant.window)

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

    Documents stand at the left of their row. What `run` makes of a token must not depend on later ones.
    `places`: where the streams are not the documents one behind the other, for each token of the documents
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
    if query.device.type == "cpu" and query.dtype.itemsize >= 4 and query.shape[1] <= _SHORT:
        return _short_causal(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


def _short_causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of short documents by plain matrix products."""
    length, count = query.shape[1], query.shape[2] // key.shape[2]
    later = query.new_full((length, length), -torch.inf).triu_(1).repeat_interleave(count, 0)
    return attend_with_mask(query, key, value, later, scale)


# Operators for packed attention on CUDA, the fastest first; which of them runs for query heads per key head
# and width of a head; and torch's variable-length attention. `prepare` fills in the latter two: plain data,
# which compiled code can read.
OPERATORS: dict[str, Operator] = {
    "FlashAttention-4": flash4.attend,
    "cuDNN for long documents": long_documents.attend,
}
_CHOSEN: dict[tuple[int, int], Operator | None] = {}
_VARLEN: list[Callable[..., Tensor]] = []


def operator_for(query: Tensor, key: Tensor, value: Tensor) -> Operator | None:
    if not _fits_kernels(query) or value.shape[-1] != query.shape[-1]:
        return None
    shape = (query.shape[1] // key.shape[1], query.shape[2])
    if shape not in _CHOSEN and not torch.compiler.is_compiling():
        prepare(*shape)
    return _CHOSEN.get(shape)


def varlen_for(query: Tensor, variant: Variant = PLAIN) -> Callable[..., Tensor] | None:
    """torch's variable-length attention where it can take `query`: 16 bit on CUDA, and at most a window."""
    if not _fits_kernels(query) or variant.beyond_window:
        return None
    if not _VARLEN:
        _VARLEN.append(unobserved(_varlen_attention))
    return _VARLEN[0] if variant is PLAIN or _varlen_has_windows() else None


def _fits_kernels(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def prepare(ratio: int, width: int) -> None:
    """Find out how to attend with `ratio` query heads per key head of this width, before code is compiled."""
    if not torch.cuda.is_available():
        return  # documents are gathered into batches
    if not _VARLEN:
        _VARLEN.append(unobserved(_varlen_attention))
    if (ratio, width) not in _CHOSEN:
        device = torch.device("cuda", torch.cuda.current_device())
        _CHOSEN[ratio, width] = unobserved(lambda: first_right(OPERATORS, ratio, width, device))


def chosen_name(ratio: int, width: int) -> str:
    """The operator that `prepare` chose for heads of this shape, for reports."""
    chosen = _CHOSEN.get((ratio, width))
    return next((name for name, operator in OPERATORS.items() if operator is chosen), "torch's own")


def head_shape(config: Any) -> tuple[int, int]:
    """(query heads per key head, width of a head) of a transformers config."""
    values = config.get_text_config().to_dict()
    heads = values["num_attention_heads"]
    width = values.get("head_dim") or values["hidden_size"] // heads
    return heads // (values.get("num_key_value_heads") or heads), width


@functools.cache
def _varlen_has_windows() -> bool:
    return "window_size" in inspect.signature(varlen_attn).parameters


@functools.cache
def _varlen_attention() -> Callable[..., Tensor]:
    """torch's causal variable-length attention behind one signature."""
    accepted = inspect.signature(varlen_attn).parameters
    # How a causal mask is asked for, and whether grouped queries and a scale are known, differs by release.
    options: dict[str, Any] = {} if _varlen_has_windows() else {"is_causal": True}
    scaled = "scale" in accepted
    if "enable_gqa" in accepted:
        options["enable_gqa"] = True

    def attend(
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
        repeat: bool = True,
    ) -> Tensor:
        if repeat and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        chosen = dict(options)
        if "is_causal" not in options:
            chosen["window_size"] = (-1 if window is None else window - 1, 0)
        if scale is not None and scaled:
            chosen["scale"] = scale
        elif scale is not None:
            query = query * (scale * query.shape[-1] ** 0.5)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = varlen_attn(query, key, value, cu_query, cu_key, longest_query, longest_key, **chosen)
        assert isinstance(out, Tensor), "only the output was asked for"
        return out

    return functools.partial(attend, repeat=not _takes_groups(attend))


def _takes_groups(attend: Callable[..., Tensor]) -> bool:
    """Whether fewer key heads than query heads are understood, in both passes: tried on a few tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        torch.randn(16, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    cu = torch.tensor([0, 16], dtype=torch.int32, device="cuda")
    results = []
    for repeat in (True, False):
        try:
            out = attend(*parts, cu, cu, 16, 16, None, repeat=repeat)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), parts)))
        except (RuntimeError, ValueError, TypeError):
            return False
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))


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
    """What transformers calls: query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None).

    `documents` knows which tokens see each other: PackedDocuments, or this rank's part of them.
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
