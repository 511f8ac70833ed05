"""Prepares a micro-batch for Megatron: this rank's tokens, document boundaries and rotary angles.

Documents are padded at their end where context parallelism cuts them into equal chunks, or where sequence
parallelism needs a divisible count. No real token sees the padding (the mask is causal); no loss reads it.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.context_parallel import PaddedStream, chunk_multiple
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.shared_prefixes import PrefixTree
from slime.backends.base import MicroBatch

Recorded = dict[int, Tensor]  # layer -> chosen experts [T, topk] of this rank's tokens


@dataclass(slots=True)
class Routes:
    """Data about this rank's T tokens, in order, that the routers of one micro-batch need."""

    padding: Tensor  # [T] bool
    groups: Tensor  # [T] set of tokens in which each is balanced
    group_tokens: Tensor  # [G] real tokens in each set, over all ranks of the replica
    step_tokens: float = 1.0  # real tokens of the whole optimizer step, over all replicas
    chosen: Tensor | None = None  # [T, layers, topk] experts to use; -1: the router's own choice
    replayed: Recorded | None = None  # choices of an earlier pass over the same micro-batch
    record: Recorded | None = None  # filled by the routers where it is not None

    def given(self, layer: int) -> Tensor | None:
        """Return [T, topk] of a layer (from 0), -1 where the router chooses; None: it always chooses."""
        if self.replayed is not None:
            return self.replayed.get(layer)
        # Layers after the decoder's are those of MTP heads, whose experts no engine reports.
        if self.chosen is None or layer >= self.chosen.shape[1]:
            return None
        return self.chosen[:, layer]


@dataclass(kw_only=True)
class PackedStream(PackedSeqParams):
    """Metadata of a packed stream, passed through Megatron's layers to slime's attention."""

    documents: PackedDocuments  # padded, of the whole stream over all context-parallel ranks
    tree: PrefixTree | None = (
        None  # gathered tokens that this rank's tokens see; None: no context parallelism
    )
    local: Tensor | None = None  # [T_local] stream positions of this rank's tokens; None: likewise
    cos: Tensor  # [T_local, 1, rotated] of this rank's tokens
    sin: Tensor
    input_ids: Tensor  # [1, T_local]
    position_ids: Tensor  # [1, T_local]
    logit_rows: Tensor  # [R_local] rows of this rank whose hidden state predicts a response token
    places: Tensor  # [R_local] which of the R response tokens each row predicts
    targets: Tensor  # [R_local]
    nucleus: Nucleus | None = None  # of R_local rows; None: tokens were drawn from the whole vocabulary
    num_targets: int  # R
    real: Tensor  # [T] padded position of each token of the micro-batch
    selected: dict[int, Tensor] = field(default_factory=dict)  # layer -> keys that later layers use, too
    routes: Routes | None = None  # set by `passes` for a mixture of experts


def padded_lengths(lengths: tuple[int, ...], *, cp_size: int, token_multiple: int) -> tuple[int, ...]:
    """Return lengths that split evenly over `cp_size` ranks, with each rank's total a multiple of
    `token_multiple`.

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
    """Build this rank's stream; `rotary` is the HF model's own rotary embedding, with any RoPE scaling.

    `after_token`: rows are those of the response tokens, not of the tokens before them. `equal_over`: ranks
    that must hold equally many tokens; all of them call this together.
    """
    if mb.media:
        raise ValueError(
            "samples have images (multimodal_train_inputs), and the Megatron trainer builds no vision tower: "
            "use --train-backend fsdp."
        )
    device = mb.input_ids.device
    lengths = padded_lengths(mb.documents.lengths, cp_size=cp_size, token_multiple=token_multiple)
    if equal_over is not None:
        longest = torch.tensor(sum(lengths), device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=equal_over)
        lengths = (*lengths[:-1], lengths[-1] + int(longest) - sum(lengths))
    padded = PaddedStream.of(mb, lengths, cp_size, cp_rank, after_token=after_token)
    documents = padded.documents
    cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), padded.position_ids)
    return PackedStream(
        qkv_format="thd",
        cu_seqlens_q=documents.cu_seqlens,
        cu_seqlens_kv=documents.cu_seqlens,
        max_seqlen_q=documents.longest,
        max_seqlen_kv=documents.longest,
        documents=documents,
        tree=padded.tree,
        local=padded.local,
        cos=cos[0][:, None],
        sin=sin[0][:, None],
        input_ids=padded.input_ids,
        position_ids=padded.position_ids,
        logit_rows=padded.rows,
        places=padded.places,
        targets=mb.targets[padded.places],
        nucleus=padded.nucleus,
        num_targets=len(mb.targets),
        real=padded.real,
    )
