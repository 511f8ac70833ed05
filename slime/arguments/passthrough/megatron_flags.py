"""Fields of megatron-core's configuration as flags; what slime declares itself is in groups/megatron.py.

The package has no command line of its own. Its configuration dataclasses are read from their source, which
takes milliseconds where importing them takes seconds.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.core.flag import option_of

CONFIG_FILES = (
    "model_parallel_config.py",
    "transformer/transformer_config.py",
    "optimizer/optimizer_config.py",
    "distributed/distributed_data_parallel_config.py",
)
CONFIG_CLASSES = (
    "ModelParallelConfig",
    "TransformerConfig",
    "MLATransformerConfig",
    "OptimizerConfig",
    "DistributedDataParallelConfig",
)

# Spellings of Megatron's own command line whose field has another name, with what a bare switch means.
SPELLINGS: dict[str, tuple[str, Any]] = {
    "--norm-epsilon": ("layernorm_epsilon", None),
    "--swiglu": ("gated_linear_unit", True),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "--grad-reduce-in-bf16": ("grad_reduce_in_fp32", False),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
    "--use-gated-attention": ("attention_output_gate", True),
    "--num-experts": ("num_moe_experts", None),
    "--decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", None),
    "--decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", None),
    "--microbatch-group-size-per-virtual-pipeline-stage": ("microbatch_group_size_per_vp_stage", None),
    "--ddp-bucket-size": ("bucket_size", None),
    "--ddp-average-in-collective": ("average_in_collective", True),
}

_LAYERS = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")  # one part of a layer pattern


@dataclass(frozen=True)
class Field:
    """One field of a configuration dataclass: `kind` is bool, int, float, str, or list of such (many)."""

    name: str
    kind: type
    many: bool


# Flags of Megatron's command line that describe the model; they are compared with its Hugging Face config.
MODEL_FACTS = {
    option_of(name): Field(name, kind, False)
    for name, kind in {
        "vocab_size": int,
        "max_position_embeddings": int,
        "rotary_base": float,
        "rotary_percent": float,
        "position_embedding_type": str,
        "use_rotary_position_embeddings": bool,
        "group_query_attention": bool,
        "untie_embeddings_and_output_weights": bool,
        "post_self_attn_layernorm": bool,
        "post_mlp_layernorm": bool,
    }.items()
}


# Further Megatron flags of slime scripts: without Megatron, the error names them as Megatron's.
_USUAL_FLAGS = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels normalization
    add-qkv-bias qk-layernorm attention-dropout hidden-dropout attention-softmax-in-fp32 rotary-interleaved
    multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale
    mscale-all-dim rotary-scaling-factor attention-output-gate linear-attention-freq linear-key-head-dim
    linear-value-head-dim linear-num-key-heads linear-num-value-heads linear-conv-kernel-dim mtp-num-layers
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-topk moe-router-score-function
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-bias-update-rate
    moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk moe-router-dtype
    moe-router-load-balancing-type moe-token-drop-policy moe-layer-freq moe-aux-loss-coeff moe-enable-deepep
    recompute-method recompute-num-layers recompute-modules account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split
"""


NEEDS_MEGATRON = "Megatron is not installed: pip install 'slime-rl[megatron]'."


@functools.cache
def megatron_fields() -> dict[str, Field]:
    """Return `--moe-aux-loss-coeff` -> its field, for fields that text can set; {} without megatron-core."""
    found = importlib.util.find_spec("megatron")
    fields: dict[str, Field] = {}
    for root in (found.submodule_search_locations if found else []) or []:
        for file in CONFIG_FILES:
            path = Path(root) / "core" / file
            if path.is_file():
                fields |= _fields_of_file(path)
    return fields and fields | MODEL_FACTS


def _fields_of_file(path: Path) -> dict[str, Field]:
    fields = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in CONFIG_CLASSES:
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    kind, many = _kind(ast.unparse(entry.annotation))
                    if kind is not None:
                        name = entry.target.id
                        fields[option_of(name)] = Field(name, kind, many)
    return fields


def _kind(annotation: str) -> tuple[type | None, bool]:
    """Convert `Optional[List[str]]` to (str, True); types that text cannot express to (None, False)."""
    text = annotation.removeprefix("Optional[").lower()
    if "callable" in text or "dtype" in text:
        return None, False
    for prefix in ("list[", "tuple["):
        if text.startswith(prefix):
            return _kind(text[len(prefix) :])[0], True
    for prefix, kind in (("bool", bool), ("int", int), ("float", float), ("str", str), ("literal", str)):
        if text.startswith(prefix) or text.startswith("union[" + prefix):
            return kind, False
    return None, False


def is_megatron_flag(option: str) -> bool:
    if option in SPELLINGS or _positive(option) in megatron_fields():
        return True
    return not megatron_fields() and (
        _positive(option) in MODEL_FACTS or _positive(option).removeprefix("--") in _USUAL_FLAGS.split()
    )


def why_missing(given: Sequence[str]) -> str:
    """Return the error for flags of Megatron where it is not installed."""
    shown = ", ".join(given[:3]) + (f" and {len(given) - 3} more" if len(given) > 3 else "")
    return f"{shown} {'is a setting' if len(given) == 1 else 'are settings'} of Megatron's. {NEEDS_MEGATRON}"


def _positive(option: str) -> str:
    """Convert `--no-moe-permute-fusion` to `--moe-permute-fusion`."""
    return "--" + option.removeprefix("--no-") if option.startswith("--no-") else option


def read_megatron_flags(found: dict[str, list[str]]) -> dict[str, Any]:
    """Return field name -> value, for the arguments that `split_flags` found."""
    values = {}
    for written, words in found.items():
        option = written.replace("_", "-")
        spelled, bare = SPELLINGS.get(option, (None, None))
        entry = megatron_fields()[option_of(spelled) if spelled else _positive(option)]
        values[entry.name] = _read(entry, option, words, bare)
    return values


def _read(entry: Field, option: str, words: list[str], bare: Any) -> Any:
    if entry.kind is bool:
        if words:
            raise ValueError(f"{option} is a switch and takes no value, but {words[0]!r} follows it.")
        return bare if bare is not None else option not in SPELLINGS and not option.startswith("--no-")
    if not words or (len(words) > 1 and not entry.many):
        raise ValueError(f"{option} takes {'values' if entry.many else 'one value'}, found {len(words)}.")
    if entry.name == "moe_layer_freq":
        return _read_pattern(option, words[0])
    try:
        read = [entry.kind(part) for word in words for part in (word.split(",") if entry.many else [word])]
    except ValueError:
        expected = f"megatron-core expects {entry.kind.__name__}"
        raise ValueError(f"{option} is {' '.join(words)!r}: {expected}.") from None
    return read if entry.many else read[0]


def _read_pattern(option: str, text: str) -> int | list[int]:
    """Read Megatron's way to write which layers have experts: `[0]*3+[1]*58`, in quotes or not."""
    plain = text.strip("'\" ()").replace(" ", "")
    if plain.isdigit() and int(plain):
        return int(plain)
    parts = [_LAYERS.fullmatch(part) for part in plain.split("+")]
    if None in parts:
        raise ValueError(f"{option} is {text!r}: write a number, or a list of 0 and 1 such as [0]*3+[1]*58.")
    return [int(layer) for part in parts if part for layer in part[1].split(",") * int(part[2] or 1)]
