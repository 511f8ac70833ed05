"""Our parts of Megatron's layers: packed attention with the HF model's rotary angles, and norms."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.attention.context_parallel import gather_keys
from slime.backends.attention.packed_documents import packed_attention
from slime.backends.megatron.stream import PackedStream


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [T, H, D] by angles [T, 1, d], d <= D; `interleaved` pairs neighbours instead of halves."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if interleaved:
        half = cos.shape[-1] // 2
        cos, sin = (part[..., :half].repeat_interleave(2, dim=-1) for part in (cos, sin))
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        low, high = turned.chunk(2, dim=-1)
        other = torch.cat((-high, low), dim=-1)
    turned = turned * cos + other * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


class PackedCoreAttention(MegatronModule):
    """Megatron's core attention, computed by slime's packed attention.

    Megatron is built without position embeddings: the stream has the angles, which are applied here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, G, D] of this context-parallel rank -> [T, H * D]."""
        stream = packed_seq_params
        assert isinstance(stream, PackedStream), "this model needs a PackedStream"
        out = self.attend(self.rotate(query, stream), self.rotate(key, stream), value, stream)
        return out.reshape(out.shape[0], -1)

    def rotate(self, x: Tensor, stream: PackedStream) -> Tensor:
        return rotate(x, stream.cos, stream.sin, interleaved=self.config.rotary_interleaved)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, stream: PackedStream) -> Tensor:
        if stream.tree is None:
            return packed_attention(query, key, value, stream.documents, scale=self.scale)
        return stream.tree.attend(query, *gather_keys(key, value, self.cp_group), self.scale)


class GatedSelfAttention(SelfAttention):
    """Megatron's attention with an output gate, which Megatron would compile anew for every length."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm, marked so that Megatron sums its gradient where ranks split the sequence."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **ignored: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.around_zero = config.layernorm_zero_centered_gamma  # the factor is one more than the weight
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        if not self.around_zero:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class NormedAdd(RMSNorm):
    """Replaces Megatron's bias-dropout-add: normalises a branch's output, then adds it to the residual."""

    # Has the signature of Megatron's bias-dropout-add, not that of a torch norm.
    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:  # type: ignore[override]
        return self._add

    def _add(self, out_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        out, bias = out_and_bias
        assert bias is None and not dropout, "branches with their own norm have neither biases nor dropout"
        return residual + super().forward(out)
