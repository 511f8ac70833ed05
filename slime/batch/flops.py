"""Floating-point operations of a transformer's forward pass: for balance between ranks, for TFLOP/s."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.types import RolloutBatch

if TYPE_CHECKING:
    from torch import Tensor

# Keys of configs for the number of experts.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide the cost of a decoder-only model."""

    # Elements of all matrices that one token passes through: chosen experts only, output matrix included.
    matrices: int
    # Layers x heads x (width of keys + width of values): operations per pair of tokens, counted causal.
    attention: int
    output: int = 0  # elements of the output matrix alone

    @classmethod
    def from_hf_config(cls, config: Any) -> "ModelShape":
        """Read a transformers config; missing fields get the value that the family implies."""
        text = config.get_text_config()
        layers, hidden = text.num_hidden_layers, text.hidden_size
        attention = _latent_attention if _read(text, "kv_lora_rank") else _plain_attention
        projections, widths = attention(text)
        # Gate, up and down.
        feed_forward = 3 * hidden * sum(_feed_forward_widths(text))
        output = hidden * text.vocab_size
        return cls(
            matrices=layers * projections + feed_forward + output,
            attention=layers * _read(text, "num_attention_heads") * widths,
            output=output,
        )


def _read(text: Any, name: str) -> int:
    """Return a size; 0 if the family has none, and the first one if it differs by layer."""
    try:
        value = getattr(text, name, None)
    except Exception:  # transformers' own, for sizes that it keeps by layer
        value = text.to_dict().get(name)
    return (value[0] if isinstance(value, list) else value) or 0


def _plain_attention(text: Any) -> tuple[int, int]:
    """Return the elements of a layer's projections, and the widths of a key and a value together."""
    heads = _read(text, "num_attention_heads") or 1
    width = _read(text, "head_dim") or text.hidden_size // heads
    key_heads = _read(text, "num_key_value_heads") or heads
    return text.hidden_size * width * 2 * (heads + key_heads), 2 * width


def _latent_attention(text: Any) -> tuple[int, int]:
    """Return the numbers for MLA (DeepSeek), where keys and values come from a low-rank vector."""
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    key = text.qk_nope_head_dim + text.qk_rope_head_dim
    query_rank = _read(text, "q_lora_rank")
    queries = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    keys_values = hidden * (rank + text.qk_rope_head_dim) + rank * heads * (
        text.qk_nope_head_dim + text.v_head_dim
    )
    return queries + keys_values + heads * text.v_head_dim * hidden, key + text.v_head_dim


def _feed_forward_widths(text: Any) -> list[int]:
    """Return the feed-forward width per token of each layer: dense, or its chosen and shared experts."""
    dense = _first(text, "intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    dense = dense or 4 * text.hidden_size
    chosen = _first(text, "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
    if not chosen or not _first(text, *EXPERT_COUNTS):
        return [dense] * text.num_hidden_layers
    # Mixtral, GPT-OSS and others have only experts, and use the key of dense models for their width.
    expert = _first(text, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = _first(
        text,
        *(
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
    ) or expert * _first(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    sparse = chosen * expert + shared
    return [sparse if _is_sparse(text, layer) else dense for layer in range(text.num_hidden_layers)]


def _first(text: Any, *names: str) -> int:
    """The first of these sizes that the config has; 0: it has none."""
    return next((size for name in names if (size := _read(text, name))), 0)


def _is_sparse(text: Any, layer: int) -> bool:
    """Return whether a layer has experts, by the rule in the model's config."""
    kinds, sparse = getattr(text, "mlp_layer_types", None), getattr(text, "moe_layers", None)
    if kinds or sparse:
        return kinds[layer] == "sparse" if kinds else layer in (sparse or ())
    first = _first(text, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    period = _first(
        text, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period"
    )
    if period and getattr(text, "expert_layer_offset", None) is not None:
        return bool(layer % period == text.expert_layer_offset)
    return (
        layer >= first
        and layer not in (getattr(text, "mlp_only_layers", None) or ())
        and (layer + 1) % (period or 1) == 0
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens that a pass computes: a shared prefix once, without padding.

    Example: a document of n tokens with r response tokens is Stream(n, n * n, r).
    """

    tokens: int
    pairs: int  # twice the pairs of tokens that attend to each other
    predicted: int  # tokens at which the output matrix is applied

    @classmethod
    def of(cls, positions: "Tensor", predicted: int) -> "Stream":
        """Build the stream from `positions`: a token's position in its document is the number of tokens
        before it.
        """
        count = positions.numel()
        return cls(count, 2 * int(positions.sum()) + count, predicted)


def pass_flops(shape: ModelShape, stream: Stream, *, backward: bool = False, trained: float = 1.0) -> float:
    """Return the operations of a forward pass over a stream; with `backward`, plus a backward pass.

    `trained`: the share of the weights that have a gradient. The backward pass computes the gradients of the
    activations for all of them, and those of the weights for this share alone. Layers that are computed again
    to save memory are not counted.
    """
    body = shape.matrices - shape.output
    products = 2.0 * (body * stream.tokens + shape.output * stream.predicted)
    scores = float(shape.attention * stream.pairs)
    return products * (2 + trained) + 3 * scores if backward else products + scores


# Elements of a patch of 14 x 14 pixels in three colours.
_PATCH_ELEMENTS = 3 * 14 * 14


def sample_sizes(batch: RolloutBatch) -> list[int]:
    """Return the size of each sample in tokens: its own, and the patches of its images."""
    media = batch.get("multimodal_train_inputs") or [None] * len(batch["tokens"])
    pairs = zip(batch["tokens"], media, strict=True)
    return [len(tokens) + num_patches(shown) for tokens, shown in pairs]


def num_patches(media: Mapping[str, Any] | None) -> int:
    """Return the number of image patches in a processor's output; 0 without pixels."""
    pixels = None if media is None else media.get("pixel_values")
    return 0 if pixels is None else math.prod(pixels.shape) // _PATCH_ELEMENTS


def typical_cost(length: int) -> float:
    """Return the relative cost of a document if no model is known: linear work plus a mid-size model's
    attention.
    """
    return length * (1.0 + length / 24576)
