"""Names of Megatron's checkpoints and of its parameters.

If all layers are alike, a checkpoint keeps one tensor for all of them, with the layer as first dimension, and
one for all experts of a layer; otherwise one tensor for each. Norms that are fused into the following matrix
are named after that matrix.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slime.backends.torch_dist.pieces import StoredTensor

# Names in the model of the families' rules -> names in checkpoints.
FUSED_ATTENTION = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
FUSED_MLP = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
LATENT_NORMS = {
    f"self_attention.{part}_layernorm.weight": f"self_attention.linear_{part}_up_proj.layer_norm_weight"
    for part in ("q", "kv")
}
BRANCH_NORMS = {
    "self_attn_bda.weight": "post_self_attn_layernorm.weight",
    "mlp_bda.weight": "post_mlp_layernorm.weight",
}
_RENAMED = FUSED_ATTENTION | FUSED_MLP | LATENT_NORMS | BRANCH_NORMS
_SAME = {there: here for here, there in _RENAMED.items()}
_LAYER = re.compile(r"(decoder\.layers|mtp\.layers\.\d+\.transformer_layer)\.(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\..*|.*_extra_state.*|.*inv_freq|rng_state.*|rerun_.*")


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter, or one half of it, as a part of a stored tensor."""

    name: str  # of the parameter in Megatron's model, layers and experts counted over the whole of it
    tensor: StoredTensor
    index: tuple[int, ...]
    half: int  # 1: the up projection, stored after the gate in a tensor of its own


def slices_of(tensor: StoredTensor) -> Iterator[Slice]:
    """Return the parameters that a stored tensor holds; none if it is not a weight."""
    key, half = tensor.key, 0
    if _NO_WEIGHTS.fullmatch(key):
        return
    if key.endswith((".weight_w", ".weight_v")):
        key, half = key[:-2], int(key.endswith("_v"))
    match = _LAYER.fullmatch(key.replace(".mtp_model_layer.", ".transformer_layer."))
    if match is None:
        yield Slice(key, tensor, (), half)
        return
    where, number, rest = match.groups()
    rest = _SAME.get(rest, rest)
    stacked = number is None and where == "decoder.layers"
    layers = range(tensor.size[0]) if stacked else [number]
    expert = _EXPERTS.fullmatch(rest)
    depth = int(stacked)
    for layer in layers:
        prefix = f"{where}." if layer is None else f"{where}.{layer}."
        at = (int(layer),) if stacked and layer is not None else ()
        if expert is None:
            yield Slice(prefix + rest, tensor, at, half)
            continue
        own, inside = expert.groups()
        for i in range(tensor.size[depth]) if own is None else [own]:
            index = (*at, int(i)) if own is None else at
            yield Slice(f"{prefix}mlp.experts.local_experts.{i}.{inside}", tensor, index, half)
