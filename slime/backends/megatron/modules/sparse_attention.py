"""Sparse attention of DeepSeek-V3.2 and GLM-5: an indexer selects keys for each token of a long document.

In documents of at most `index_topk` tokens the ordinary attention uses all keys. The indexer has no gradient,
as in transformers, so its weights stay as they were read. Each tensor-parallel rank selects for its tokens. A
layer without an indexer uses the selection of a layer before it on the same pipeline stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.backends.attention.documents import PackedDocuments
from slime.backends.megatron.modules.layers import PackedCoreAttention, rotate
from slime.backends.megatron.modules.mla import MLAConfig, PackedMLA
from slime.backends.megatron.stream import PackedStream

_SCORES = 1 << 26  # scores of the indexer, and entries of a mask, that are in memory at a time


@dataclass
class SparseMLAConfig(MLAConfig):
    """MLAConfig with the sizes of the indexer."""

    index_topk: int = 2048
    index_heads: int = 32
    index_head_dim: int = 128
    index_rotates_neighbours: bool = False
    index_layers: list[int] = field(default_factory=list)  # 1 for each decoder layer that has an indexer

    def source(self, layer: int) -> int:
        """Return the layer (from 0) whose selection a layer uses; layers of MTP heads have indexers."""
        if layer >= self.num_layers:
            return layer
        return max((i for i in range(layer + 1) if self.index_layers[i]), default=-1)


class Indexer(nn.Module):
    """Scores all keys of a document for each token, with few heads, and selects the best."""

    def __init__(self, config: SparseMLAConfig) -> None:
        super().__init__()
        self.config = config
        assert config.q_lora_rank is not None, "models with an indexer have a latent query"
        width, plain = (
            config.index_heads * config.index_head_dim,
            {"bias": False, "dtype": config.params_dtype},
        )
        self.wq_b = nn.Linear(config.q_lora_rank, width, **plain)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, **plain)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6, dtype=config.params_dtype)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_heads, bias=False, dtype=torch.float32)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, stream: PackedStream, first: int) -> Tensor:
        """hidden [t, H] and latent query [t, L] of the tokens from `first` on -> keys [T, topk] of all.

        Keys are int32 places in the document. Tensor-parallel ranks call it together.
        """
        config, count = self.config, len(hidden)
        split = config.sequence_parallel
        cos, sin = (angles[first : first + count] for angles in (stream.cos, stream.sin))
        turn = partial(rotate, cos=cos, sin=sin, interleaved=config.index_rotates_neighbours)
        queries = self.wq_b(latent).view(count, config.index_heads, config.index_head_dim)
        queries = turn(queries).float()
        keys = turn(self.k_norm(self.wk(hidden))[:, None])[:, 0]
        keys = (gather_from_sequence_parallel_region(keys) if split else keys).float()
        weights = F.linear(hidden.float(), self.weights_proj.weight) * config.index_heads**-0.5
        chosen = torch.zeros(count, config.index_topk, dtype=torch.int32, device=hidden.device)
        for start, length, rows in _blocks(stream.documents, config, first, count):
            scores = torch.matmul(queries[rows], keys[start : start + length].T).mul_(
                config.index_head_dim**-0.5
            )
            scores = torch.matmul(weights[rows, None], scores.relu_())[:, 0]
            places = torch.arange(first + rows.start - start, first + rows.stop - start, device=hidden.device)
            later = torch.arange(length, device=hidden.device) > places[:, None]
            scores.masked_fill_(later, float("-inf"))
            chosen[rows] = scores.topk(config.index_topk, dim=-1).indices.to(torch.int32)
        return gather_from_sequence_parallel_region(chosen) if split else chosen


def _blocks(
    documents: PackedDocuments, config: SparseMLAConfig, first: int, count: int
) -> Iterator[tuple[int, int, slice]]:
    """Yield start and length of each long document with a block of its rows among `count` from `first` on."""
    start = 0
    for length in documents.lengths:
        begin, end = max(start, first), min(start + length, first + count)
        size = max(1, _SCORES // (length * config.index_heads))
        if length > config.index_topk:
            for row in range(begin, end, size):
                yield start, length, slice(row - first, min(row + size, end) - first)
        start += length


class SparseCore(nn.Module):
    """Core attention that gets selected keys in place of a mask, and without them calls the ordinary one."""

    def __init__(self, dense: PackedCoreAttention) -> None:
        super().__init__()
        self.dense = dense

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedStream,
        **options: Any,
    ) -> Tensor:
        """query and key [T, H, D], value [T, H, V], selected keys [T, topk] -> [T, H * V]."""
        if attention_mask is None:
            return self.dense(query, key, value, packed_seq_params=packed_seq_params, **options)
        outputs, start = [], 0
        for length in packed_seq_params.documents.lengths:
            size = max(1, _SCORES // length)
            for first in range(0, length, size):
                last = min(first + size, length)
                rows = slice(start + first, start + last)
                # Selected keys that come later than the token are there only to fill its row.
                mask = torch.zeros(last - first, length, dtype=torch.bool, device=query.device)
                if length > attention_mask.shape[1]:
                    mask.scatter_(1, attention_mask[rows].long(), True)
                else:
                    mask.fill_(True)
                mask = mask.tril_(first)[:, :last]
                known = slice(start, start + last)
                q, k, v = (x.transpose(0, 1)[None] for x in (query[rows], key[known], value[known]))
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.dense.scale)
                outputs.append(out[0].transpose(0, 1).flatten(1))
            start += length
        return torch.cat(outputs)


def check_stage(config: TransformerConfig, first: int) -> None:
    """Refuse a pipeline stage whose first layer needs the selection of a layer on another stage."""
    if isinstance(config, SparseMLAConfig) and config.source(first) != first:
        able = [layer for layer, has in enumerate(config.index_layers) if has]
        raise ValueError(
            f"a pipeline stage begins with layer {first}, which uses the keys that layer "
            f"{config.source(first)} selects: let stages begin with one of the layers {able} by "
            "--pipeline-model-parallel-size, --decoder-first-pipeline-num-layers or "
            "--pipeline-model-parallel-layout."
        )


class SparseMLA(PackedMLA):
    """MLA over the keys that an indexer selects, where a document has more than `index_topk` tokens."""

    config: SparseMLAConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core_attention: Any = SparseCore(self.core_attention)
        layer = self.layer_number - 1
        self.source = self.config.source(layer)
        self.indexer = Indexer(self.config) if self.source == layer else None
        self.is_shared = self.config.source(layer + 1) == layer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        stream: PackedStream = options["packed_seq_params"]
        if stream.documents.longest > self.config.index_topk:
            if stream.tree is not None:
                raise ValueError(
                    f"a sample of up to {stream.documents.longest} tokens with --context-parallel-size above "
                    f"1: for more than {self.config.index_topk} tokens (index_topk) this model selects keys, "
                    "which must be on one rank; use --context-parallel-size 1, or shorter samples "
                    "(--rollout-max-context-len)."
                )
            attention_mask = self._selected(hidden_states, stream)
        return super().forward(hidden_states, attention_mask, *args, **options)

    @torch.no_grad()
    def _selected(self, hidden: Tensor, stream: PackedStream) -> Tensor:
        if self.indexer is None:
            return stream.selected[self.source]
        down = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden)[0])
        latent = self.q_layernorm(self._cut_sequence(down))
        rank = self.pg_collection.tp.rank() if self.config.sequence_parallel else 0
        selected = self.indexer(hidden[:, 0], latent[:, 0], stream, rank * len(hidden))
        if self.is_shared:
            stream.selected[self.source] = selected
        return selected
