"""Builds a small random model of the user's own architecture from config.json alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slime.utils.models.model_files import check_model

VOCABULARY = 512
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
_KEY_VALUE_HEADS, _HEAD_DIM = 2, 16
# Upper limits of sizes inside MLA.
_MLA = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
_MLA |= dict(index_n_heads=16, index_head_dim=16)  # of the indexer of sparse attention
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOWS, WINDOW = ("sliding_window", "attention_chunk_size", "window_size", "index_topk"), 4
# Upper limits of sizes inside layers with a recurrent state.
_STATES = dict(hidden_size_per_layer_input=16, linear_num_key_heads=2, linear_num_value_heads=4)
_STATES |= dict(mamba_n_heads=4, mamba_num_heads=4, rotary_dim=8, linear_key_head_dim=8)
_STATES |= dict(linear_value_head_dim=8, mamba_d_state=8, ssm_state_size=8, state_size=8)
_OF_WEIGHTS = ("config.json", "generation_config.json")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def read_config(path: str) -> Any:
    # Heavy import, only needed here.
    from transformers import CONFIG_MAPPING, AutoConfig

    check_model("--hf-checkpoint", path)
    file = Path(path) / "config.json"
    kind = json.loads(file.read_text()).get("model_type") if file.is_file() else None
    if kind is not None and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"--hf-checkpoint {path}: this transformers has no model of type {kind!r}, so there is nothing "
            "to compare the trainers with; models whose code is on the hub cannot be verified."
        )
    return AutoConfig.from_pretrained(path)


def shrink(config: Any, *, layers: int, full_width: bool = False) -> Any:
    """Return the architecture with `layers` layers, few tokens and experts; narrow unless `full_width`.

    Only the text model of a multimodal model remains.
    """
    config = config.get_text_config()
    values = config.to_dict()
    # hidden_size -> n_embd, where a family has names of its own
    own_names = {name: own for name, own in config.attribute_map.items() if own in values}
    values |= {name: getattr(config, name) for name in own_names}
    changes = _fewer_layers(values, layers) | _fewer_experts(values)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if name in values:
            changes[name] = min(values[name], VOCABULARY)
    changes |= {name: None for name in _SPECIAL_TOKENS if name in values}
    # Windows must be shorter than the documents to have an effect.
    changes |= {name: min(values[name], WINDOW) for name in _WINDOWS if values.get(name)}
    if not full_width:
        changes |= _narrower(values, layers)
    for name in ("vision_config", "audio_config"):  # towers are large, and a text model does not use them
        if isinstance(part := values.get(name), dict):
            depths = {"num_hidden_layers", "num_blocks"} & part.keys()
            changes[name] = part | {depth: min(part[depth], 2) for depth in depths}
    changes |= {"dtype": "float32", "use_cache": False}
    values = {name: value for name, value in values.items() if name not in own_names}
    values.pop("quantization_config", None)
    values |= {own_names.get(name, name): value for name, value in changes.items()}
    try:
        return type(config).from_dict(values)
    except Exception:  # some families insist on special tokens
        numbers = {name: number for number, name in enumerate(_SPECIAL_TOKENS) if name in values}
        return type(config).from_dict(values | numbers)


def _fewer_layers(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Reduce the number of layers; of dense layers before the experts one remains, if two layers remain."""
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    for name, value in values.items():
        if isinstance(value, list) and len(value) == values["num_hidden_layers"]:
            changes[name] = [value[0], *[value[-1]] * (layers - 1)]
    if values.get("layer_types"):
        kinds = list(dict.fromkeys(values["layer_types"]))
        changes["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    if values.get("per_layer_config"):
        wide = [i for i in range(layers) if changes["layer_types"][i] == "full_attention"]
        changes["per_layer_config"] = {str(i): {"head_dim": 2 * _HEAD_DIM} for i in wide}
    if values.get("num_kv_shared_layers"):
        changes["num_kv_shared_layers"] = layers // 2 if layers >= 4 else 0
    if values.get("mlp_only_layers"):
        changes["mlp_only_layers"] = [0] if layers > 1 else []
    if values.get("first_k_dense_replace"):
        changes["first_k_dense_replace"] = min(values["first_k_dense_replace"], layers - 1)
    if values.get("max_window_layers"):
        changes["max_window_layers"] = layers
    return changes | {name: 0 for name in ("num_nextn_predict_layers", "num_mtp_layers") if values.get(name)}


def _fewer_experts(values: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in _EXPERT_COUNTS if values.get(name)]
    if not names:
        return {}
    experts = min(values[names[0]], EXPERTS)
    changes = dict.fromkeys(names, experts)
    if values.get("num_experts_per_tok"):
        changes["num_experts_per_tok"] = min(values["num_experts_per_tok"], EXPERTS_PER_TOKEN)
    if (values.get("n_group") or 1) > 1:
        changes |= {"n_group": 2, "topk_group": 1}
    return changes


def _narrower(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return smaller sizes; heads keep their ratio to key-value heads, widths to the hidden size."""
    heads = values.get("num_attention_heads") or 4
    groups = values.get("num_key_value_heads") or heads
    changes: dict[str, Any] = {
        name: min(values[name], size) for name, size in _MLA.items() if values.get(name)
    }
    shared = min(heads // groups, 4)
    new_groups = min(groups, _KEY_VALUE_HEADS if shared > 1 else 4)
    new_heads = min(heads, 4) if changes else new_groups * shared
    hidden = values["hidden_size"]
    head_dim = min(values.get("head_dim") or hidden // heads, _HEAD_DIM)
    width = new_heads * head_dim
    changes["hidden_size"] = width
    if "num_attention_heads" in values:
        changes["num_attention_heads"] = new_heads
    if "num_key_value_heads" in values:
        changes["num_key_value_heads"] = new_heads if changes.get("kv_lora_rank") else new_groups
    if "head_dim" in values:
        changes["head_dim"] = changes.get("qk_rope_head_dim", head_dim)
    for name in _WIDTHS:
        if isinstance(value := values.get(name), list):
            changes[name] = [2 * width] * layers
        elif value:
            changes[name] = max(16, round(value / hidden * width / 8) * 8)
    for name, size in _STATES.items():
        if isinstance(values.get(name), int):
            changes[name] = min(values[name], size)
    if isinstance(values.get("mamba_d_ssm"), int):
        changes["mamba_d_ssm"] = values["mamba_expand"] * width
    if isinstance(values.get("mamba_d_head"), int):
        changes["mamba_d_head"] = values["mamba_expand"] * width // changes["mamba_n_heads"]
    return changes


def build(config: Any, folder: Path, source: str, *, seed: int = 0) -> None:
    """Write a random model as a hub checkpoint, with the tokenizer of `source` if it is a folder."""
    # Heavy import, only needed here.
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw(model)
    model.save_pretrained(folder)
    for file in Path(source).iterdir() if Path(source).is_dir() else ():
        is_text = file.suffix in (".json", ".txt", ".model", ".jinja") and file.is_file()
        if is_text and file.name not in _OF_WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draw weights so that every tensor matters: norms differ from one, biases from zero."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq") or not tensor.is_floating_point():
            continue
        if tensor.ndim > 1:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
        elif name.endswith("bias") or "lambda" in name:
            tensor.normal_(0.0, 0.1)
        else:
            tensor.normal_(1.0, 0.1)


def has_experts(config: Any) -> bool:
    values = config.to_dict()
    return any(values.get(name) for name in _EXPERT_COUNTS)


def describe(config: Any) -> str:
    values = json.loads(config.to_json_string(use_diff=False))
    size = f"{values['num_hidden_layers']} layers, hidden {values['hidden_size']}"
    experts = next((f", {values[name]} experts" for name in _EXPERT_COUNTS if values.get(name)), "")
    heads = f"{values['num_attention_heads']} heads{experts}"
    return f"{values['model_type']}: {size}, {heads}, vocabulary {values['vocab_size']}"
