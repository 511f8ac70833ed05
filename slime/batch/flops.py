"""Floating-point operations of a transformer's forward pass: for balance between ranks, for TFLOP/s."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.types import RolloutBatch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide the cost of a decoder-only model."""

    # Elements of all matrices that one token passes through: chosen experts only, output matrix included.
    matrices: int
    # Layers x heads x (width of keys + width of values): operations per pair of tokens, counted causal.
    attention: int

    @classmethod
    def from_hf_config(cls, config: Any) -> "ModelShape":
        """Reads a transformers config; fields that a family lacks fall back to what that family implies."""
        text = config.get_text_config()
        layers, hidden = text.num_hidden_layers, text.hidden_size
        attention = _latent_attention if _read(text, "kv_lora_rank") else _plain_attention
        projections, widths = attention(text)
        # Gate, up and down.
        feed_forward = 3 * hidden * sum(_feed_forward_widths(text))
        matrices = layers * projections + feed_forward + hidden * text.vocab_size
        return cls(matrices=matrices, attention=layers * _read(text, "num_attention_heads") * widths)


def _read(text: Any, name: str) -> int:
    """A size; 0 where the family has none. Of one that differs by layer, the first."""
    try:
        value = getattr(text, name, None)
    except Exception:  # transformers' own, for sizes that it keeps by layer
        value = text.to_dict().get(name)
    return (value[0] if isinstance(value, list) else value) or 0


def _plain_attention(text: Any) -> tuple[int, int]:
    """Elements of a layer's projections, and the widths of a key and a value together."""
    heads = _read(text, "num_attention_heads") or 1
    width = _read(text, "head_dim") or text.hidden_size // heads
    key_heads = _read(text, "num_key_value_heads") or heads
    return text.hidden_size * width * 2 * (heads + key_heads), 2 * width


def _latent_attention(text: Any) -> tuple[int, int]:
    """The same for MLA (DeepSeek), where keys and values come from a low-rank vector."""
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    key = text.qk_nope_head_dim + text.qk_rope_head_dim
    query_rank = _read(text, "q_lora_rank")
    queries = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    keys_values = hidden * (rank + text.qk_rope_head_dim) + rank * heads * (
        text.qk_nope_head_dim + text.v_head_dim
    )
    return queries + keys_values + heads * text.v_head_dim * hidden, key + text.v_head_dim


def _feed_forward_widths(text: Any) -> list[int]:
    """The feed-forward width that one token uses in each layer: dense, or its experts and shared ones."""
    dense = _read(text, "intermediate_size") or 4 * text.hidden_size
    chosen, expert = _read(text, "num_experts_per_tok"), _read(text, "moe_intermediate_size")
    if not chosen or not expert:
        return [dense] * text.num_hidden_layers
    shared = _read(text, "shared_expert_intermediate_size") or _read(text, "n_shared_experts") * expert
    first = _read(text, "first_k_dense_replace")
    return [dense] * first + [chosen * expert + shared] * (text.num_hidden_layers - first)


def forward_flops(shape: ModelShape, length: int) -> float:
    """Operations of one forward pass over one document of `length` tokens, attention counted causal."""
    return float(2 * shape.matrices * length + shape.attention * length * length)


def total_forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    return sum(forward_flops(shape, length) for length in lengths)


# Elements of a patch of 14 x 14 pixels in three colours.
_PATCH_ELEMENTS = 3 * 14 * 14


def sample_sizes(batch: RolloutBatch) -> list[int]:
    """What each sample costs in tokens: its own, and the patches of its images."""
    media = batch.get("multimodal_train_inputs") or [None] * len(batch["tokens"])
    pairs = zip(batch["tokens"], media, strict=True)
    return [len(tokens) + num_patches(shown) for tokens, shown in pairs]


def num_patches(media: Mapping[str, Any] | None) -> int:
    """Patches in what a processor made of images, where it made pixels."""
    pixels = None if media is None else media.get("pixel_values")
    return 0 if pixels is None else math.prod(pixels.shape) // _PATCH_ELEMENTS


def typical_cost(length: int) -> float:
    """Relative cost of a document when no model is known: linear work plus a mid-size model's attention."""
    return length * (1.0 + length / 24576)
