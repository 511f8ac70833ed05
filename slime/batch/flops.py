"""Floating-point operations of a transformer's forward pass, for balance between ranks and for TFLOP/s metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide the cost of a decoder-only model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # active per token: for a mixture of experts, the chosen experts and the shared one
    vocab_size: int

    @classmethod
    def from_hf_config(cls, config: Any) -> "ModelShape":
        """Reads a transformers config; fields that a family lacks fall back to what that family implies."""
        text = config.get_text_config()
        heads, hidden = text.num_attention_heads, text.hidden_size
        ffn = getattr(text, "intermediate_size", None) or 4 * hidden
        experts, expert_size = (getattr(text, name, None) for name in ("num_experts_per_tok", "moe_intermediate_size"))
        if experts and expert_size:
            ffn = expert_size * experts + (getattr(text, "shared_expert_intermediate_size", None) or 0)
        return cls(
            num_layers=text.num_hidden_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            ffn_size=ffn,
            vocab_size=text.vocab_size,
        )


def forward_flops(shape: ModelShape, length: int) -> float:
    """Operations of one forward pass over one document of `length` tokens, attention counted causal."""
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    projections = 2 * hidden * (2 * width + 2 * shape.num_kv_heads * shape.head_dim)
    per_token = shape.num_layers * (projections + 6 * hidden * shape.ffn_size) + 2 * hidden * shape.vocab_size
    attention = shape.num_layers * 2 * width * length * length
    return float(per_token * length + attention)


def total_forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    return sum(forward_flops(shape, length) for length in lengths)


def typical_cost(length: int) -> float:
    """Relative cost of a document when no model is known: linear work plus the attention share of a mid-size model."""
    return length * (1.0 + length / 24576)
