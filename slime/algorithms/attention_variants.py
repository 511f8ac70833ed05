"""Variants of causal attention: sliding windows, chunks, attention sinks, soft-capped scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_KIND = "attention_kind"  # attribute of an attention module, set by note_kinds
_SINK_COLUMNS = 8  # kernels want the width of a head to be a multiple of it


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """Properties of a layer's attention besides the causal mask."""

    window: int | None = None  # tokens that a token sees, itself included; None: all earlier tokens
    chunk: int | None = None  # tokens of the pieces of a document that do not see each other; None: no pieces
    softcap: float | None = None  # scores become cap x tanh(score / cap)
    sinks: Tensor | None = None  # [H] score of a further key whose value is zero

    @property
    def beyond_window(self) -> bool:
        return not (self.chunk is None and self.softcap is None and self.sinks is None)


PLAIN = Variant()


def variant_of(module: nn.Module, mask: Any, options: Mapping[str, Any]) -> Variant:
    """Return the variant that a layer of transformers asks for, by keyword arguments or by its config.

    Some families pass a window only as a mask, which is not built here: it is read from their config.
    """
    config: Any = getattr(module, "config", None)
    kind = getattr(module, _KIND, None)
    if kind is None:
        kind = _kind_of(module)
    window, sinks = options.get("sliding_window"), options.get("s_aux")
    if window is None and "sliding" in kind:
        window = config.sliding_window
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    if mask is not None or options.get("position_bias") is not None or options.get("is_causal") is False:
        raise ValueError(f"{type(module).__name__} uses an attention mask that slime does not support.")
    if window is None and chunk is None and sinks is None and options.get("softcap") is None:
        return PLAIN
    return Variant(window, chunk, options.get("softcap"), sinks)


def note_kinds(layer: nn.Module) -> None:
    """Store the kind of a layer's attention on its modules, before they are compiled.

    Code compiled for one layer then serves all layers of that kind.
    """
    for module in layer.modules():
        if hasattr(module, "config"):
            setattr(module, _KIND, _kind_of(module))


def _kind_of(module: nn.Module) -> str:
    config: Any = getattr(module, "config", None)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if all(kind == kinds[0] for kind in kinds):
        return kinds[0] if kinds else ""
    layer = getattr(module, "layer_idx", None)
    return kinds[layer] if layer is not None and layer < len(kinds) else ""


def sees(queries: int, keys: int, variant: Variant, device: torch.device) -> Tensor:
    """Return [queries, keys]: which keys each query sees; queries are the last of `keys` tokens."""
    column = torch.arange(keys, device=device)
    row = column[keys - queries :, None]
    seen = column <= row
    if variant.window is not None:
        seen &= column > row - variant.window
    if variant.chunk is not None:
        seen &= column // variant.chunk == row // variant.chunk
    return seen


def attend_to_prefix(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant
) -> Tensor:
    """Compute the last tokens of documents: query [B, C, H, D], key and value [B, S, G, D], S >= C."""
    seen = sees(query.shape[1], key.shape[1], variant, query.device)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
    return masked_attention(query, key, value, seen, scale, variant).transpose(1, 2)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None, variant: Variant
) -> Tensor:
    """query [B, H, C, D], key and value [B, H, S, D], seen broadcastable to [B, H, C, S] -> [B, H, C, D]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if variant.softcap is not None:
        return _capped(query, key, value, seen, scale, variant)
    if variant.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    # The sink is an extra key that every query sees; a query column of 1 gives it the sink's score.
    batch, width = key.shape[0], key.shape[-1]
    one = F.pad(query.new_ones(1), (0, _SINK_COLUMNS - 1)).expand(*query.shape[:-1], -1)
    sink = F.pad((variant.sinks / scale).to(key.dtype)[None, :, None, None], (width, _SINK_COLUMNS - 1))
    key = torch.cat((sink.expand(batch, -1, -1, -1), F.pad(key, (0, _SINK_COLUMNS))), dim=2)
    value = F.pad(value, (0, 0, 1, 0))
    seen = F.pad(seen, (1, 0), value=True)
    return F.scaled_dot_product_attention(
        torch.cat((query, one), dim=-1), key, value, attn_mask=seen, scale=scale
    )


def _capped(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, variant: Variant
) -> Tensor:
    assert variant.softcap is not None, "only for soft-capped scores"
    scores = variant.softcap * torch.tanh((query @ key.transpose(-1, -2)).float() * scale / variant.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((sinks, scores), dim=-1)
        value = F.pad(value, (0, 0, 1, 0))
    return scores.softmax(-1).to(value.dtype) @ value
