"""Context parallelism by zigzag: documents are cut into 2 x size chunks; rank r holds r and 2 x size - 1 - r.

Under a causal mask late chunks cost more than early ones, so each rank gets one of both. Queries stay on
their rank; keys and values are gathered.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.attention_variants import PLAIN, Variant
from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.share import Share
from slime.backends.attention.shared_prefixes import PrefixTree
from slime.backends.base import MicroBatch


def chunk_multiple(size: int) -> int:
    """Return the number of which document lengths must be a multiple."""
    return 2 * size if size > 1 else 1


def zigzag_positions(lengths: tuple[int, ...], size: int, rank: int) -> Tensor:
    """Return the stream positions that `rank` holds, document by document, in its order.

    Example: lengths (8,), size 2: rank 0 holds 0, 1, 6, 7 and rank 1 holds 2, 3, 4, 5.
    """
    return torch.cat([torch.arange(first, end) for _, first, end in _chunks(lengths, size, rank)])


def _chunks(lengths: tuple[int, ...], size: int, rank: int) -> list[tuple[int, int, int]]:
    """Return the rank's chunks: the start of the document and the chunk's bounds, all in the stream."""
    found, start = [], 0
    for length in lengths:
        assert length % (2 * size) == 0, f"document of {length} tokens is not divisible over {size} ranks"
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            found.append((start, start + index * chunk, start + (index + 1) * chunk))
        start += length
    return found


def zigzag_tree(lengths: tuple[int, ...], size: int, rank: int) -> PrefixTree:
    """Return this rank's chunks as parts of the gathered stream; each sees its document up to its own end."""
    gathered = torch.cat([zigzag_positions(lengths, size, r) for r in range(size)])
    row_of = torch.empty_like(gathered)
    row_of[gathered] = torch.arange(len(gathered))
    chunks = _chunks(lengths, size, rank)
    return PrefixTree(
        keys=torch.cat([row_of[start:end] for start, _, end in chunks]),
        own=None,
        num_tokens=len(gathered),
        whole=PackedDocuments.from_lengths([end - start for start, _, end in chunks]),
        cu_query=PackedDocuments.from_lengths([end - first for _, first, end in chunks]).cu_seqlens,
        longest=None,
    )


class _GatherRows(torch.autograd.Function):
    """Concatenates all ranks' rows; a rank's gradient is summed over the ranks that used its rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, local.shape[0]
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        # gloo lacks reduce-scatter for some dtypes; the sum is split instead.
        dist.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.rows
        return grad[start : start + ctx.rows].contiguous(), None


def gather_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks, in the order of the ranks."""
    if key.shape != value.shape:
        return _GatherRows.apply(key, group), _GatherRows.apply(value, group)
    gathered_key, gathered_value = _GatherRows.apply(torch.cat((key, value), dim=-1), group).chunk(2, dim=-1)
    return gathered_key, gathered_value


@dataclass(frozen=True, slots=True)
class SpreadTree:
    """A PrefixTree whose tokens are split over the ranks of `group`; used in place of PackedDocuments."""

    tree: PrefixTree  # queries: this rank's tokens; stream: the tokens of all ranks in rank order
    group: dist.ProcessGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        return self.tree.attend(query, *gather_keys(key, value, self.group), scale, variant)

    def to(self, device: torch.device) -> "SpreadTree":
        return replace(self, tree=self.tree.to(device))


@dataclass(frozen=True, slots=True)
class PaddedStream:
    """A micro-batch whose documents were padded at their ends, and this rank's part of it."""

    documents: PackedDocuments  # padded, over all ranks
    local: Tensor | None  # stream positions of this rank's tokens; None: all of them
    tree: PrefixTree | None  # likewise
    input_ids: Tensor  # [1, T_local]
    position_ids: Tensor  # [1, T_local]
    rows: Tensor  # [R_local] this rank's rows that predict a response token
    places: Tensor  # [R_local] which of the R response tokens each predicts
    nucleus: Nucleus | None  # of R_local rows
    real: Tensor  # [T] padded position of each token of the micro-batch

    @classmethod
    def of(
        cls, mb: MicroBatch, lengths: tuple[int, ...], size: int, rank: int, *, after_token: bool = False
    ) -> "PaddedStream":
        """Pad documents to `lengths`; `after_token`: rows are those of response tokens themselves."""
        device, total = mb.input_ids.device, sum(lengths)
        documents = PackedDocuments.from_lengths(lengths).to(device)
        starts = documents.cu_seqlens[:-1].long()
        first = torch.repeat_interleave(starts, torch.tensor(mb.documents.lengths, device=device))
        real = first + mb.position_ids[0]
        input_ids = mb.input_ids.new_zeros(total)
        input_ids[real] = mb.input_ids[0]
        beginning = torch.repeat_interleave(starts, torch.tensor(lengths, device=device))
        position_ids = torch.arange(total, device=device) - beginning
        rows, nucleus = real[mb.logit_positions + int(after_token)], mb.nucleus
        places, tree, local = torch.arange(len(mb.targets), device=device), None, None
        if size > 1:
            local, tree = zigzag_positions(lengths, size, rank).to(device), zigzag_tree(lengths, size, rank)
            row_of = torch.full((total,), -1, device=device)
            row_of[local] = torch.arange(len(local), device=device)
            rows = row_of[rows]
            places = (rows >= 0).nonzero()[:, 0]
            rows, nucleus = rows[places], None if nucleus is None else nucleus.select(places)
            input_ids, position_ids = input_ids[local], position_ids[local]
            tree = tree.to(device)
        return cls(documents, local, tree, input_ids[None], position_ids[None], rows, places, nucleus, real)


class StreamShare(Share):
    """One rank's part of a micro-batch whose documents were padded at their end to cut evenly.

    Example with 2 ranks and one sample of tokens [5, 6, 7], of which 2 are response: padded to 4 tokens, rank
    0 holds positions 0 and 3 (token 5 and the padding) and predicts target 0 from its row 0; rank 1 holds 1
    and 2 and predicts target 1 from its row 0. Under a causal mask no real token sees the padding.
    """

    @classmethod
    def of(
        cls, mb: MicroBatch, size: int, rank: int, group: dist.ProcessGroup, *, after_token: bool = False
    ) -> "StreamShare":
        """Return the share of `mb`, on the CPU; `after_token`: rows are those of the response tokens."""
        multiple = chunk_multiple(size)
        lengths = tuple(-(-length // multiple) * multiple for length in mb.documents.lengths)
        stream = PaddedStream.of(mb, lengths, size, rank, after_token=after_token)
        assert stream.tree is not None and stream.local is not None, "there are several ranks"
        copies, experts = torch.isin(stream.local, stream.real), mb.routed_experts
        if experts is not None:
            padded = experts.new_full((sum(lengths), *experts.shape[1:]), -1)
            padded[stream.real] = experts
            experts = padded[stream.local]
        images = None if mb.images is None else mb.images.moved(stream.real, stream.local)
        return cls(
            input_ids=stream.input_ids,
            position_ids=stream.position_ids,
            documents=SpreadTree(stream.tree, group),
            rows=stream.rows,
            places=stream.places,
            copies=copies,
            nucleus=stream.nucleus,
            group=group,
            count=len(mb.targets),
            experts=experts,
            images=images,
        )
