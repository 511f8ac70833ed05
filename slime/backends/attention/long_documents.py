"""Packed attention on CUDA: cuDNN for each long document, variable-length attention for runs of short ones.

A packed batch spends most of its attention on few long documents, where cuDNN's kernels are about twice as
fast as the variable-length ones of torch. cuDNN prepares a kernel for each length it meets, so a document is
computed at its length rounded up: the rows after its end belong to whatever follows in the stream, no real
token attends to them, and their gradient is zero.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.attention.attention_operator import packed_operator

# From this number of rows x heads on, one document fills the device.
LONG_ROWS = 32768
_ALIGNMENT = 4  # fp32 numbers: kernels read them 16 bytes at a time
_aten = torch.ops.aten


class DocumentPart(NamedTuple):
    """Tokens `start` to `end` of the stream: one long document, or a run of short ones."""

    start: int
    end: int
    rounded: int  # padded length of a long document; 0: a run of short ones
    first: int  # documents `first` to `last` (exclusive) are in it
    last: int


def rounded_length(length: int) -> int:
    """Round up to one of few lengths: each is prepared once, and little padding is computed."""
    grain = 128 if length <= 8192 else 512
    return -(-length // grain) * grain


def plan_parts(bounds: list[int], long: int) -> Iterator[DocumentPart]:
    """Return the parts of a stream with document boundaries `bounds`; `long`: least length of a long one."""
    run = 0  # first document of the current run of short ones
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end - start < long:
            continue
        if run < document:
            yield DocumentPart(bounds[run], start, 0, run, document)
        yield DocumentPart(start, end, rounded_length(end - start), document, document + 1)
        run = document + 1
    if run < len(bounds) - 1:
        yield DocumentPart(bounds[run], bounds[-1], 0, run, len(bounds) - 1)


def _parts(bounds: list[int], heads: int) -> Iterator[DocumentPart]:
    # Only the variable-length backward pass has a deterministic form.
    deterministic = torch.are_deterministic_algorithms_enabled()
    return plan_parts(bounds, bounds[-1] + 1 if deterministic else LONG_ROWS // heads)


def _statistics_size(query: Tensor, bounds: Tensor) -> int:
    """Return an upper bound of the numbers kept for backward: one per head and row, parts aligned."""
    documents = bounds.shape[0] - 1
    return query.shape[1] * (query.shape[0] + 512 * documents) + _ALIGNMENT * documents


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _extended(stream: Tensor, part: DocumentPart) -> Tensor:
    """Return [1, heads, rounded, width]: a long document and what follows; zeros after the stream's end."""
    if part.start + part.rounded > stream.shape[0]:
        return _zero_extended(stream, part)
    return _as_document(stream, part.start * stream.stride(0), part.rounded)


def _zero_extended(stream: Tensor, part: DocumentPart) -> Tensor:
    missing = part.rounded - (part.end - part.start)
    if not missing:
        return _as_document(stream, part.start * stream.stride(0), part.rounded)
    return _as_document(F.pad(stream[part.start : part.end], (0, 0, 0, 0, 0, missing)), 0, part.rounded)


def _as_document(stream: Tensor, offset: int, length: int) -> Tensor:
    """[1, heads, length, width] of a contiguous stream [T, heads, width]: one call, as thousands are made."""
    _, heads, width = stream.shape
    strides = (length * heads * width, width, heads * width, 1)
    return stream.as_strided((1, heads, length, width), strides, stream.storage_offset() + offset)


def _put(stream: Tensor, part: DocumentPart, document: Tensor) -> None:
    """Write the real rows of [1, heads, rounded, width] into their place in the stream."""
    count, (_, heads, width) = part.end - part.start, stream.shape
    size, stride = (count, heads, width), document.stride()
    own = document.as_strided(size, (stride[2], stride[1], stride[3]), document.storage_offset())
    stream[part.start : part.end].copy_(own)


def _run_bounds(cu_seqlens: Tensor, bounds: list[int], part: DocumentPart) -> tuple[Tensor, int]:
    cu = cu_seqlens[part.first : part.last + 1] - part.start
    sizes = [bounds[i + 1] - bounds[i] for i in range(part.first, part.last)]
    return cu, max(sizes)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    kept = query.new_empty(_statistics_size(query, bounds), dtype=torch.float32)
    ends, filled = bounds.tolist(), 0
    for part in _parts(ends, query.shape[1]):
        if part.rounded:
            inputs = (_extended(x, part) for x in (query, key, value))
            result, sums, *_ = _aten._scaled_dot_product_cudnn_attention(
                *inputs, None, True, 0.0, True, scale=scale
            )
            _put(out, part, result)
        else:
            rows = slice(part.start, part.end)
            cu, longest = _run_bounds(cu_seqlens, ends, part)
            out[rows], sums, *_ = _aten._flash_attention_forward(
                query[rows], key[rows], value[rows], cu, cu, longest, longest, 0.0, True, False, scale=scale
            )
        kept[filled : filled + sums.numel()] = sums.flatten()
        filled += _aligned(sums.numel())
    return out, kept


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    kept: Tensor,
    cu_seqlens: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value = (x.contiguous() for x in (grad, query, key, value))
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    ends, filled, heads = bounds.tolist(), 0, query.shape[1]
    for part in _parts(ends, heads):
        count = part.end - part.start
        size = heads * (part.rounded or count)
        sums, filled = kept[filled : filled + size], filled + _aligned(size)
        if part.rounded:
            streams = [_extended(x, part) for x in (query, key, value, out)]
            length, sums = part.rounded, sums.view(1, heads, part.rounded, 1)
            known: tuple[Any, ...] = (_zero_extended(grad, part), *streams, sums, unused, unused)
            results = _aten._scaled_dot_product_cudnn_attention_backward(
                *known, None, None, None, length, length, 0.0, True, scale=scale
            )
            for whole, document in zip(grads, results, strict=True):
                _put(whole, part, document)
        else:
            rows = slice(part.start, part.end)
            cu, longest = _run_bounds(cu_seqlens, ends, part)
            parts = (x[rows] for x in (grad, query, key, value, out))
            known = (*parts, sums.view(heads, count), cu, cu, longest, longest)
            results = _aten._flash_attention_backward(*known, 0.0, True, no_dropout, unused, scale=scale)
            for whole, piece in zip(grads, results, strict=True):
                whole[rows] = piece
    return grads


attend = packed_operator(
    "packed_attention",
    _forward,
    _backward,
    lambda query, key, value, cu_seqlens, bounds, scale: (_statistics_size(query, bounds),),
)
