"""A micro-batch as Megatron sees it: this rank's tokens, boundaries and rotary
angles, and where the response logits are.

Documents are padded at their end where context parallelism cuts them into equal chunks, or where sequence
parallelism needs a divisible count. Under a causal mask no real token sees the padding, and no loss term
reads it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.context_parallel import ZigzagPlan, chunk_multiple
from slime.backends.attention.packed import PackedDocuments
from slime.backends.base import MicroBatch


@dataclass
class PackedStream(PackedSeqParams):
    """Travels through Megatron's layers to our attention, which reads the fields below."""

    documents: PackedDocuments | None = None  # padded, of the whole stream over all context-parallel ranks
    plan: ZigzagPlan | None = None  # None: no context parallelism
    cos: Tensor | None = None  # [T_local, 1, rotated] of this rank's tokens
    sin: Tensor | None = None
    input_ids: Tensor | None = None  # [1, T_local]
    position_ids: Tensor | None = None  # [1, T_local]
    logit_rows: Tensor | None = None  # [R_local] rows of this rank that speak of a response token
    places: Tensor | None = None  # [R_local] which of the R response tokens each row speaks of
    targets: Tensor | None = None  # [R_local]
    nucleus: Nucleus | None = None  # of R_local rows
    num_targets: int = 0  # R
    real: Tensor | None = None  # [T] padded position of each token of the micro-batch
    routes: Any = None  # of a mixture of experts: slime.backends.megatron.routing.Routes


def padded_lengths(lengths: tuple[int, ...], *, cp_size: int, token_multiple: int) -> tuple[int, ...]:
    """Lengths that cut evenly over `cp_size` ranks, each rank's total a multiple of `token_multiple`.

    Example: (3, 5) with cp_size=2, token_multiple=1 -> (4, 8); with cp_size=1, token_multiple=4 -> (3, 5).
    """
    chunk = chunk_multiple(cp_size)
    padded = [-(-length // chunk) * chunk for length in lengths]
    while sum(padded) % (cp_size * token_multiple):
        padded[-1] += chunk
    return tuple(padded)


def build_stream(
    mb: MicroBatch,
    rotary: nn.Module,
    *,
    cp_size: int,
    cp_rank: int,
    token_multiple: int = 1,
    after_token: bool = False,
    equal_over: dist.ProcessGroup | None = None,
) -> PackedStream:
    """`rotary` is the HF model's own rotary embedding, so that every kind of
    RoPE scaling is the one of the hub model.

    `after_token`: the rows are those of the response tokens, not of the tokens before them. `equal_over`:
    ranks that must hold equally many tokens, on which all of them call this.
    """
    device = mb.input_ids.device
    lengths = padded_lengths(mb.documents.lengths, cp_size=cp_size, token_multiple=token_multiple)
    if equal_over is not None:
        total = torch.tensor(sum(lengths), device=device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=equal_over)
        lengths = (*lengths[:-1], lengths[-1] + int(total) - sum(lengths))
    documents = PackedDocuments.from_lengths(lengths).to(device)
    sizes = torch.tensor(mb.documents.lengths, device=device)
    starts = documents.cu_seqlens[:-1].long()
    first = torch.repeat_interleave(starts, sizes)
    real = first + mb.position_ids[0]
    total = sum(lengths)
    input_ids = mb.input_ids.new_zeros(total)
    input_ids[real] = mb.input_ids[0]
    padded_sizes = torch.tensor(lengths, device=device)
    position_ids = torch.arange(total, device=device) - torch.repeat_interleave(starts, padded_sizes)
    rows, places = real[mb.logit_positions + int(after_token)], torch.arange(len(mb.targets), device=device)
    plan, nucleus = None, mb.nucleus
    if cp_size > 1:
        plan = ZigzagPlan.build(documents, cp_size, cp_rank)
        row_of = torch.full((total,), -1, device=device)
        row_of[plan.local] = torch.arange(len(plan.local), device=device)
        rows = row_of[rows]
        places = (rows >= 0).nonzero()[:, 0]
        rows = rows[places]
        nucleus = None if nucleus is None else nucleus.select(places)
        input_ids, position_ids = input_ids[plan.local], position_ids[plan.local]
    cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), position_ids[None])
    return PackedStream(
        qkv_format="thd",
        cu_seqlens_q=documents.cu_seqlens,
        cu_seqlens_kv=documents.cu_seqlens,
        max_seqlen_q=documents.longest,
        max_seqlen_kv=documents.longest,
        documents=documents,
        plan=plan,
        cos=cos[0][:, None],
        sin=sin[0][:, None],
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        logit_rows=rows,
        places=places,
        targets=mb.targets[places],
        nucleus=nucleus,
        num_targets=len(mb.targets),
        real=real,
    )
