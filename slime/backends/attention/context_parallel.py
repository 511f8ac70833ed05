"""Context parallelism by zigzag: documents are cut into 2 x size chunks; rank r holds r and 2 x size - 1 - r.

Under a causal mask late chunks cost more than early ones; one of each kind balances the ranks. Queries stay
where they are, keys and values are gathered.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.attention_variants import PLAIN, Variant, attend_to_prefix
from slime.algorithms.nucleus import Nucleus
from slime.backends.attention import packed_documents
from slime.backends.attention.documents import PackedDocuments
from slime.backends.base import MicroBatch


def chunk_multiple(size: int) -> int:
    """Document lengths must be a multiple of this."""
    return 2 * size if size > 1 else 1


def zigzag_positions(lengths: tuple[int, ...], size: int, rank: int) -> Tensor:
    """Stream positions that `rank` holds, document by document, in its order.

    Example: lengths (8,), size 2: rank 0 holds 0, 1, 6, 7 and rank 1 holds 2, 3, 4, 5.
    """
    positions, start = [], 0
    for length in lengths:
        assert length % chunk_multiple(size) == 0, (
            f"document of {length} tokens is not cut evenly over {size} ranks"
        )
        if size == 1:
            positions.append(torch.arange(start, start + length))
        else:
            chunk = length // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                positions.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(positions)


@dataclass(frozen=True, slots=True)
class ZigzagPlan:
    """Where this rank's tokens stand in the stream, and how gathered keys come back into stream order."""

    documents: PackedDocuments  # of the whole stream
    size: int
    rank: int
    local: Tensor  # [T / size] stream positions of this rank's tokens
    order: Tensor  # [T] for each stream position, its row among the ranks' tokens put behind each other
    # The same as a list of queries, one per chunk, and the prefix of its document that each sees:
    seen: Tensor  # stream positions of the prefixes, one behind the other
    cu_query: Tensor  # [chunks + 1] int32
    cu_key: Tensor  # [chunks + 1] int32

    @classmethod
    def build(cls, documents: PackedDocuments, size: int, rank: int) -> "ZigzagPlan":
        parts = [zigzag_positions(documents.lengths, size, r) for r in range(size)]
        gathered = torch.cat(parts)
        order = torch.empty_like(gathered)
        order[gathered] = torch.arange(len(gathered))
        starts = documents.cu_seqlens.tolist()
        prefixes, queries = [], []
        for start, length in zip(starts, documents.lengths, strict=False):
            chunk = length // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                queries.append(chunk)
                prefixes.append(torch.arange(start, start + (index + 1) * chunk))
        cu_query = PackedDocuments.from_lengths(queries).cu_seqlens
        cu_key = PackedDocuments.from_lengths([len(prefix) for prefix in prefixes]).cu_seqlens
        plan = cls(documents, size, rank, parts[rank], order, torch.cat(prefixes), cu_query, cu_key)
        return plan.to(documents.cu_seqlens.device)

    def to(self, device: torch.device) -> "ZigzagPlan":
        names = ("local", "order", "seen", "cu_query", "cu_key")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, documents=self.documents.to(device), **moved)


class _GatherRows(torch.autograd.Function):
    """All ranks' rows behind each other; a rank's gradient is summed over the ranks that used its rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, local.shape[0]
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        # gloo has no reduce-scatter of every dtype; the sum is cut instead.
        dist.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.rows
        return grad[start : start + ctx.rows].contiguous(), None


class _PlaceTokens(torch.autograd.Function):
    """Each rank's values at its places of one vector that all ranks then hold.

    All ranks compute the same loss from it, so the gradient of a rank's own values is its part, not a sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = torch.zeros(count, dtype=values.dtype, device=values.device)
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


def gather_keys(
    key: Tensor, value: Tensor, group: dist.ProcessGroup, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The keys and values of all ranks, one rank behind the other, or in the `order` of these rows."""
    if key.shape != value.shape:
        return gather_rows(key, group, order), gather_rows(value, group, order)
    pair = gather_rows(torch.cat((key, value), dim=-1), group, order)
    gathered_key, gathered_value = pair.split(key.shape[-1], dim=-1)
    return gathered_key, gathered_value


def gather_rows(local: Tensor, group: dist.ProcessGroup, order: Tensor | None) -> Tensor:
    rows: Tensor = _GatherRows.apply(local, group)
    return rows if order is None else rows.index_select(0, order)


def place_tokens(values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """[R] values of all ranks from this rank's values at `places`; each place belongs to exactly one rank."""
    return _PlaceTokens.apply(values, places, count, group)


def zigzag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ZigzagPlan,
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
    variant: Variant = PLAIN,
) -> Tensor:
    """Causal attention within documents of which this rank holds two chunks each.

    query [T / size, H, D], key and value [T / size, G, D] in the rank's order -> [T / size, H, D].
    """
    key, value = gather_keys(key, value, group, plan.order)
    if (attend := packed_documents.varlen_for(query, variant)) is not None:
        # Queries of a chunk are the last tokens of the prefix that they see: a causal mask is aligned there.
        key, value, bound = (
            key.index_select(0, plan.seen),
            value.index_select(0, plan.seen),
            plan.documents.bound,
        )
        cus = plan.cu_query, plan.cu_key
        return attend(query, key, value, *cus, bound, bound, scale, window=variant.window)
    results, row, start = [], 0, 0
    for length in plan.documents.lengths:
        chunk = length // (2 * plan.size)
        for index in (plan.rank, 2 * plan.size - 1 - plan.rank):
            seen = (index + 1) * chunk
            rows, prefix = slice(row, row + chunk), slice(start, start + seen)
            parts = (query[None, rows], key[None, prefix], value[None, prefix])
            results.append(attend_to_prefix(*parts, scale, variant)[0])
            row += chunk
        start += length
    return torch.cat(results)


@dataclass(frozen=True, slots=True)
class SharedDocuments:
    """Documents spread over the ranks of `group`: what attention gets in place of PackedDocuments."""

    plan: ZigzagPlan
    group: dist.ProcessGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        return zigzag_attention(query, key, value, self.plan, self.group, scale=scale, variant=variant)


@dataclass(frozen=True, slots=True)
class StreamShare:
    """One rank's part of a micro-batch whose documents were padded at their end to cut evenly.

    Example with 2 ranks and one sample of tokens [5, 6, 7], of which 2 are response: padded to 4 tokens, rank
    0 holds positions 0 and 3 (token 5 and the padding) and predicts target 0 from its row 0; rank 1 holds 1
    and 2 and predicts target 1 from its row 0. Under a causal mask no real token sees the padding.
    """

    input_ids: Tensor  # [1, T / size]
    position_ids: Tensor  # [1, T / size]
    documents: SharedDocuments
    rows: Tensor  # [R_local] this rank's rows that predict a response token
    places: Tensor  # [R_local] which of the R response tokens each predicts
    real: Tensor  # [T / size] whether a token is none of the padding
    nucleus: Nucleus | None = None  # of R_local rows

    @property
    def is_whole(self) -> bool:
        """Whether all response tokens of the micro-batch are on this rank."""
        return False

    @property
    def copies(self) -> Tensor:
        """[T / size] for how many samples each token stands: padding for none."""
        return self.real

    def join(self, values: Tensor, count: int) -> Tensor:
        """All ranks' values of response tokens, [count], from this rank's, [R_local]."""
        return place_tokens(values, self.places, count, self.documents.group)

    @classmethod
    def of(
        cls, mb: MicroBatch, size: int, rank: int, group: dist.ProcessGroup, *, after_token: bool = False
    ) -> "StreamShare":
        """The share of `mb`, on the CPU; `after_token`: rows are those of response tokens themselves."""
        multiple = chunk_multiple(size)
        lengths = tuple(-(-length // multiple) * multiple for length in mb.documents.lengths)
        documents = PackedDocuments.from_lengths(lengths)
        plan = ZigzagPlan.build(documents, size, rank)
        starts, sizes = documents.cu_seqlens[:-1].long(), torch.tensor(mb.documents.lengths)
        padded_place = torch.repeat_interleave(starts, sizes) + mb.position_ids[0]
        total = sum(lengths)
        input_ids, real = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.bool)
        input_ids[padded_place] = mb.input_ids[0]
        real[padded_place] = True
        position_ids = torch.arange(total) - torch.repeat_interleave(starts, torch.tensor(lengths))
        row_of = torch.full((total,), -1)
        row_of[plan.local] = torch.arange(len(plan.local))
        rows = row_of[padded_place[mb.logit_positions + int(after_token)]]
        places = (rows >= 0).nonzero()[:, 0]
        own = plan.local
        shared = SharedDocuments(plan, group)
        nucleus = None if mb.nucleus is None else mb.nucleus.select(places)
        return cls(
            input_ids[own][None], position_ids[own][None], shared, rows[places], places, real[own], nucleus
        )

    def to(self, device: torch.device) -> "StreamShare":
        names = ("input_ids", "position_ids", "rows", "places", "real")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        documents = replace(self.documents, plan=self.documents.plan.to(device))
        nucleus = None if self.nucleus is None else self.nucleus.to(device)
        return replace(self, **moved, documents=documents, nucleus=nucleus)
