"""A model family: settings from the HF config, and rules that pair Megatron's parameters with hub names.

A rule works both ways. `to_local` cuts hub tensors into what one tensor-parallel rank holds; `to_hub` joins
all ranks' parts again. What a rank holds is decided by the rule's kind:

    replicated   the same tensor on every rank
    exact        the same, and exported in fp32 whatever the dtype of the rest
    column       rows cut over the ranks (dimension 0)
    row          columns cut over the ranks (dimension 1)
    swapped      column, with the two halves of the columns exchanged
    vocab        rows cut over the ranks, after padding the vocabulary to a multiple of their number
    qkv          query, key and value interleaved by key-value group, rows cut over the ranks
    gated_qkv    the same, where the hub's query has a gate after each head
    delta_...    queries, keys, values and gates of a gated delta net interleaved by key head, rows cut; the
                 hub has two tensors of such rows (fused), the first three as blocks of one tensor and the
                 others apart (apart), or only these blocks (conv)
    gate_up      each rank's rows of the gate above its rows of the up projection
    fused_gate_up  the same, from a hub tensor that holds the whole gate above the whole up projection
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.shared.scalar_head import HEAD
from slime.utils.models.hub_names import NESTED, TEXT

_INTERLEAVED = ("qkv", "gated_qkv", "delta_fused", "delta_apart", "delta_conv")
_PLAIN = ("replicated", "exact", "column", "swapped", "row", "vocab", "gate_up", "fused_gate_up")
KINDS = (*_PLAIN, *_INTERLEAVED)


@dataclass(frozen=True, slots=True)
class Rule:
    """Pairs a parameter's name in Megatron's model (`mcore`) with its names in the checkpoint (`hub`).

    `{layer}` and `{expert}` stand for numbers, counted over the whole model; `{head}` for the number of an
    MTP head, `{beyond}` for that number plus the decoder's layers.
    """

    mcore: str
    hub: tuple[str, ...]  # in the order that the kind asks for
    kind: str  # one of KINDS

    @property
    def pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.mcore)
        for name in ("layer", "expert", "head"):
            escaped = escaped.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)")
        return re.compile(escaped)

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.mcore


@dataclass(frozen=True, slots=True)
class DeltaDims:
    """Sizes of gated delta nets."""

    heads: int  # of keys
    key: int  # width of a key
    values: int  # value heads of a key head
    value: int  # width of a value


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of the model that are needed to split and join its tensors."""

    groups: int  # key-value heads
    head_dim: int
    vocab: int
    layers: int = 0  # of the decoder
    mtp_heads: int = 0
    delta: DeltaDims | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One HF model type. `settings` are fields of Megatron's TransformerConfig."""

    model_type: str
    settings: Callable[[Any], dict[str, Any]]
    rules: tuple[Rule, ...]
    # Names of MTP heads in checkpoints; they are built only if they train, and otherwise saved unchanged.
    mtp_prefix: str | None = None
    mtp_rules: tuple[Rule, ...] = ()  # for what an MTP head has besides a decoder layer
    mtp_layer: str | None = None  # name of an MTP head's decoder layer, if it is not `mtp_prefix`
    mtp_heads: int = 0  # where the config has no field for their number
    branch_norms: bool = False  # outputs of attention and MLP are normalised before the residual sum
    # Entries of `layer_types` in the config that the modules here compute.
    layer_kinds: tuple[str, ...] = ("full_attention",)
    nested: bool = False  # the hub's checkpoints have this model beside a vision tower, which is not built

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """Return all rules, including those of the MTP heads, each of which has a decoder layer."""
        rules = [_nested(rule) for rule in self.rules] if self.nested else self.rules
        if self.mtp_prefix is None:
            return tuple(rules)
        inside = [
            Rule(
                rule.mcore.replace(LAYER, MTP_LAYER + "transformer_layer."),
                tuple(name.replace(HUB_LAYER, f"{self.mtp_layer or self.mtp_prefix}.") for name in rule.hub),
                rule.kind,
            )
            for rule in self.rules
            if rule.mcore.startswith(LAYER)
        ]
        return (*rules, *self.mtp_rules, *inside)

    def mtp_pattern(self, dims: Dims) -> re.Pattern[str] | None:
        """Return a pattern for hub names of MTP tensors; None: the model has none."""
        if self.mtp_prefix is None or not dims.mtp_heads:
            return None
        first = {"beyond": dims.layers, "head": 0}
        escaped = re.escape(self.mtp_prefix)
        for name, start in first.items():
            choice = "|".join(str(start + head) for head in range(dims.mtp_heads))
            escaped = escaped.replace(re.escape("{" + name + "}"), f"(?:{choice})")
        return re.compile(escaped + r"\..+")


def _nested(rule: Rule) -> Rule:
    hub = (NESTED + name.removeprefix(TEXT) if name.startswith(TEXT) else name for name in rule.hub)
    return replace(rule, hub=tuple(hub))


LAYER = "decoder.layers.{layer}."
HUB_LAYER = "model.layers.{layer}."
MTP_LAYER = "mtp.layers.{head}."


def dense_settings(hf: Any) -> dict[str, Any]:
    """Return the settings that all families share: they descend from Llama."""
    if hf.hidden_act != "silu":
        raise ValueError(
            f"{hf.model_type} uses the activation {hf.hidden_act!r}; the Megatron backend knows silu only."
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim,
        # Some mixtures have no dense layer.
        "ffn_hidden_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def refuse_biases(hf: Any, *names: str) -> None:
    if found := [name for name in names if getattr(hf, name)]:
        raise ValueError(
            f"{hf.model_type} with {' and '.join(found)} is not supported by the Megatron backend."
        )


def in_layer(mcore: str, hub: Sequence[str] | str, kind: str) -> Rule:
    """Make a rule of every decoder layer; names are those inside the layer."""
    names = (hub,) if isinstance(hub, str) else tuple(hub)
    return Rule(LAYER + mcore, tuple(HUB_LAYER + name for name in names), kind)


def mtp_rules(
    prefix: str, embedding_norm: str, hidden_norm: str, join: str, last_norm: str, kind: str
) -> tuple[Rule, ...]:
    """An MTP head's norms and the matrix (of kind `kind`) that joins embedding and hidden state."""
    return (
        Rule(MTP_LAYER + "enorm.weight", (f"{prefix}.{embedding_norm}.weight",), "replicated"),
        Rule(MTP_LAYER + "hnorm.weight", (f"{prefix}.{hidden_norm}.weight",), "replicated"),
        Rule(MTP_LAYER + "eh_proj.weight", (f"{prefix}.{join}.weight",), kind),
        Rule(MTP_LAYER + "final_layernorm.weight", (f"{prefix}.{last_norm}.weight",), "replicated"),
    )


def qkv(part: str) -> Rule:
    """Make the rule of query, key and value; `part` is "weight" or "bias"."""
    names = [f"self_attn.{name}_proj.{part}" for name in "qkv"]
    return in_layer(f"self_attention.linear_qkv.{part}", names, "qkv")


OUTSIDE = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
)
SCALAR_HEAD = Rule("output_layer.weight", (HEAD,), "replicated")  # of a critic or a reward model
NORMS = (
    in_layer("input_layernorm.weight", "input_layernorm.weight", "replicated"),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "replicated"),
)
ATTENTION = (qkv("weight"), in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"))
QK_NORMS = (
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "replicated"),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "replicated"),
)
DENSE_MLP = (
    in_layer("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
)


def to_local(kind: str, tensors: Sequence[Tensor], dims: Dims, size: int, rank: int) -> Tensor:
    """Split hub tensors: return what rank `rank` of `size` holds."""
    if kind in ("replicated", "exact"):
        return tensors[0]
    if kind == "swapped":
        return _swap(tensors[0]).chunk(size)[rank]
    if kind == "row":
        return tensors[0].chunk(size, dim=1)[rank]
    if kind == "vocab":
        missing = -tensors[0].shape[0] % size
        return F.pad(tensors[0], (0, 0, 0, missing)).chunk(size)[rank]
    if kind == "fused_gate_up":
        return to_local("gate_up", tensors[0].chunk(2), dims, size, rank)
    if kind == "gate_up":
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
    whole = _interleave(kind, tensors, dims) if kind in _INTERLEAVED else tensors[0]
    return whole.chunk(size)[rank]


def to_hub(kind: str, parts: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """Join what all ranks hold, in their order, to hub tensors."""
    if kind in ("replicated", "exact"):
        return [parts[0]]
    if kind == "swapped":
        return [_swap(torch.cat(list(parts)))]
    if kind == "row":
        return [torch.cat(list(parts), dim=1)]
    if kind == "vocab":
        return [torch.cat(list(parts))[: dims.vocab]]
    if kind == "fused_gate_up":
        return [torch.cat(to_hub("gate_up", parts, dims))]
    if kind == "gate_up":
        return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
    whole = torch.cat(list(parts))
    if kind not in _INTERLEAVED:
        return [whole]
    groups, widths = _part_widths(kind, len(whole), dims)
    by_group = whole.reshape(groups, -1, *whole.shape[1:])
    return _hub_tensors(kind, [part.flatten(0, 1) for part in by_group.split(widths, dim=1)], dims)


def _swap(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)


def hub_rows(kind: str, rows: int, dims: Dims) -> list[int]:
    """Return how many of the rows of a whole fused matrix come from each hub tensor."""
    if kind not in _INTERLEAVED:
        return [rows // 2] * 2
    groups, widths = _part_widths(kind, rows, dims)
    parts = [torch.empty(groups * width, device="meta") for width in widths]
    return [len(tensor) for tensor in _hub_tensors(kind, parts, dims)]


def _part_widths(kind: str, rows: int, dims: Dims) -> tuple[int, list[int]]:
    """Return the number of groups of an interleaved tensor, and the rows of each part of a group."""
    if kind in ("qkv", "gated_qkv"):
        width, shared = dims.head_dim, 1 + (kind == "gated_qkv")
        queries = [(rows // dims.groups - 2 * width) // shared] * shared
        return dims.groups, [*queries, width, width]
    assert dims.delta is not None, "only models with gated delta nets have such rules"
    key, value, heads = dims.delta.key, dims.delta.values * dims.delta.value, dims.delta.values
    widths = {
        "delta_fused": [2 * (key + value), 2 * heads],
        "delta_apart": [key, key, value, value, heads, heads],
        "delta_conv": [key, key, value],
    }
    return dims.delta.heads, widths[kind]


def _interleave(kind: str, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
    """Join hub tensors: for each group its rows of every part, such as its queries, its key, its value."""
    first = tensors[0]
    if kind == "gated_qkv":
        pair = first.unflatten(0, (-1, 2, dims.head_dim)).unbind(1)
        parts = [*(part.flatten(0, 1) for part in pair), *tensors[1:]]
    elif kind in ("delta_apart", "delta_conv"):
        assert dims.delta is not None, "only models with gated delta nets have such rules"
        keys = dims.delta.heads * dims.delta.key
        parts = [*first.split((keys, keys, len(first) - 2 * keys)), *tensors[1:]]
    else:
        parts = list(tensors)
    groups = dims.groups if dims.delta is None or kind.endswith("qkv") else dims.delta.heads
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _hub_tensors(kind: str, parts: list[Tensor], dims: Dims) -> list[Tensor]:
    """Return hub tensors from the parts of an interleaved one; the reverse of the first step there."""
    if kind == "gated_qkv":
        pair = [part.unflatten(0, (-1, dims.head_dim)) for part in parts[:2]]
        return [torch.stack(pair, dim=1).flatten(0, 2), *parts[2:]]
    if kind in ("delta_apart", "delta_conv"):
        return [torch.cat(parts[:3]), *parts[3:]]
    return parts
