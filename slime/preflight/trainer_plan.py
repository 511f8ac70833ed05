"""Counts the parameters of a model from config.json, and estimates the memory of a Megatron layout.

Not covered: compiled layers, buffers of collectives, fragmentation, the inference engine.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.groups.training import MOMENT_BYTES
from slime.utils.models.pipeline_stages import layers_of_chunks

GIB = 2**30
_WEIGHT, _GRADIENT, _MASTER, _ACTIVATION = 2, 4, 4, 2  # bytes of one number


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of layers, embedding or output matrix, by how ranks share them."""

    cut: float = 0.0  # over tensor-parallel ranks
    whole: float = 0.0  # on every tensor-parallel rank
    experts: float = 0.0  # over expert- and expert-tensor-parallel ranks

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.cut + other.cut, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> float:
        return self.cut + self.whole + self.experts


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parallel sizes of a layout. Example: 16 ranks as tp 2, pp 2 leave dp 4."""

    ranks: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    layers: tuple[int, ...] = ()  # of each chunk in the order of the model; empty: equal shares

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def expert_copies(self) -> int:
        return self.ranks // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline stage."""

    stage: int
    parameters: float  # a count
    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def plan_stages(model: dict[str, Any], sizes: Sizes, options: Any) -> list[RankMemory]:
    """Return the memory of each pipeline stage; ValueError where the model cannot be split like this."""
    _check(model, sizes)
    stages = layers_per_stage(sizes, model["num_hidden_layers"])
    return [_stage_memory(model, sizes, *numbered, options) for numbered in enumerate(stages)]


def _check(model: dict[str, Any], sizes: Sizes) -> None:
    heads, experts = model["num_attention_heads"], number_of_experts(model)
    layout = f"{sizes.ranks} trainer ranks are not a multiple of"
    pipeline = f"pipeline {sizes.pp}"
    problems = {
        f"{layout} tensor {sizes.tp} x {pipeline} x context {sizes.cp} parallelism": (
            sizes.ranks % (sizes.tp * sizes.pp * sizes.cp)
        ),
        f"{layout} expert-tensor {sizes.etp} x expert {sizes.ep} x {pipeline} parallelism": (
            sizes.ranks % (sizes.etp * sizes.ep * sizes.pp)
        ),
        f"--tensor-model-parallel-size is {sizes.tp}, but the model has {heads} attention heads": (
            heads % sizes.tp
        ),
        "--virtual-pipeline-model-parallel-size needs --pipeline-model-parallel-size of at least 2": (
            sizes.vpp > 1 and sizes.pp == 1
        ),
        "--sequence-parallel needs --tensor-model-parallel-size of at least 2": (
            sizes.sequence_parallel and sizes.tp == 1
        ),
        "a mixture of experts with --tensor-model-parallel-size above 1 needs --sequence-parallel": (
            experts and sizes.tp > 1 and not sizes.sequence_parallel
        ),
        f"--expert-model-parallel-size is {sizes.ep}, but the model has {experts or 'no'} experts": (
            sizes.ep > 1 and (not experts or experts % sizes.ep)
        ),
    }
    for text, is_wrong in problems.items():
        if is_wrong:
            raise ValueError(f"{text}: change the sizes.")


def layers_per_stage(sizes: Sizes, layers: int) -> list[list[int]]:
    """Return the layers of each stage by number; an interleaved stage holds every pp-th chunk."""
    counts = list(sizes.layers) or layers_of_chunks(layers, sizes.pp, sizes.vpp, {})
    ends = list(itertools.accumulate(counts))
    chunks = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    return [[layer for chunk in chunks[stage :: sizes.pp] for layer in chunk] for stage in range(sizes.pp)]


# -- the model -----------------------------------------------------------------------------------------------


def read_model(path: str) -> dict[str, Any]:
    """The config.json of a folder; the text part of a model that has several."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"--hf-checkpoint {path}: no config.json there, and slime/catalog/gpus.py has no model of that "
            "name; a run is planned from the folder of its model."
        )
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None
    with known_shape(str(file)):
        return values | values.get("text_config", {})


@contextmanager
def known_shape(path: str) -> Iterator[None]:
    """Turn errors about missing sizes of a config into one ValueError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: no plan of such a model ({error!r}).") from None


def number_of_experts(model: dict[str, Any]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((model[name] for name in names if model.get(name)), 0)


def has_experts(model: dict[str, Any], layer: int) -> bool:
    if not number_of_experts(model) or layer in (model.get("mlp_only_layers") or ()):
        return False
    return (
        layer >= (model.get("first_k_dense_replace") or 0)
        and (layer + 1) % (model.get("decoder_sparse_step") or 1) == 0
    )


def _attention_widths(model: dict[str, Any]) -> tuple[int, int]:
    """Return the width of all queries together, and of all keys and values together."""
    heads = model["num_attention_heads"]
    if model.get("kv_lora_rank"):
        key = model["qk_nope_head_dim"] + model["qk_rope_head_dim"]
        return heads * key, heads * (key + model["v_head_dim"])
    size = model.get("head_dim") or model["hidden_size"] // heads
    return heads * size, 2 * (model.get("num_key_value_heads") or heads) * size


def _attention_parameters(model: dict[str, Any]) -> Parameters:
    hidden, (query, key_value) = model["hidden_size"], _attention_widths(model)
    if not model.get("kv_lora_rank"):
        return Parameters(cut=hidden * (query + key_value) + query * hidden)
    heads, low, rope = model["num_attention_heads"], model["kv_lora_rank"], model["qk_rope_head_dim"]
    down = hidden * (low + rope)
    up = low * heads * (model["qk_nope_head_dim"] + model["v_head_dim"])
    up += heads * model["v_head_dim"] * hidden
    rank = model.get("q_lora_rank")
    down, up = (down + hidden * rank, up + rank * query) if rank else (down, up + hidden * query)
    return Parameters(cut=up, whole=down)


def _shared_width(model: dict[str, Any]) -> int:
    several = (model.get("n_shared_experts") or 0) * _expert_width(model)
    return model.get("shared_expert_intermediate_size") or several


def _expert_width(model: dict[str, Any]) -> int:
    """Return the width of an expert; models that have only experts use the key of dense models."""
    width: int = model.get("moe_intermediate_size") or model["intermediate_size"]
    return width


def layer_parameters(model: dict[str, Any], layer: int) -> Parameters:
    hidden = model["hidden_size"]
    around = _attention_parameters(model) + Parameters(whole=2 * hidden)
    if not has_experts(model, layer):
        return around + Parameters(cut=3 * hidden * model["intermediate_size"])
    experts = number_of_experts(model)
    return around + Parameters(
        cut=3 * hidden * _shared_width(model),
        whole=hidden * experts,
        experts=3 * hidden * _expert_width(model) * experts,
    )


def parameters_of(model: dict[str, Any], layers: Sequence[int]) -> Parameters:
    """Return the parameters of these layers; all layers with experts are alike, and so are all others."""
    held = Parameters()
    for alike in _alike(model, layers):
        one = layer_parameters(model, alike[0])
        held += Parameters(*(len(alike) * count for count in (one.cut, one.whole, one.experts)))
    return held


def _alike(model: dict[str, Any], layers: Sequence[int]) -> list[list[int]]:
    kinds: dict[bool, list[int]] = {}
    for layer in layers:
        kinds.setdefault(has_experts(model, layer), []).append(layer)
    return list(kinds.values())


def outside_parameters(model: dict[str, Any]) -> dict[str, Parameters]:
    """Return parameters of embedding, output matrix and last norm; a tied output matrix has none."""
    matrix = model["vocab_size"] * model["hidden_size"]
    head = 0 if model.get("tie_word_embeddings") else matrix
    return {"first": Parameters(cut=matrix), "last": Parameters(cut=head, whole=model["hidden_size"])}


# -- memory --------------------------------------------------------------------------------------------------


def _stage_memory(
    model: dict[str, Any], sizes: Sizes, stage: int, layers: list[int], options: Any
) -> RankMemory:
    held = parameters_of(model, layers)
    outside = outside_parameters(model)
    if stage == 0:
        held += outside["first"]
    if stage == sizes.pp - 1:
        held += outside["last"]
        if model.get("tie_word_embeddings") and sizes.pp > 1:
            held += outside["first"]  # a copy of the tied matrix
    dense = held.cut / sizes.tp + held.whole
    experts = held.experts / (sizes.ep * sizes.etp)
    shards = (sizes.dp * sizes.cp, sizes.expert_copies) if sizes.distributed_optimizer else (1, 1)
    stepped = dense / shards[0] + experts / shards[1]
    activations = _activations(model, sizes, stage, layers, options)
    away = _MASTER * stepped * _share_away(options)
    return RankMemory(
        stage,
        dense + experts,
        _WEIGHT * (dense + experts),
        _GRADIENT * (dense + experts),
        # Weights kept in host memory are loaded for the step, when activations are freed.
        (_MASTER + moment_bytes(options)) * stepped - away + max(0.0, away - activations),
        activations,
    )


def moment_bytes(settings: Any, *, on_gpu: bool = True) -> float:
    """Return bytes on the device of both moments of one parameter, from a run's settings or a plan's."""
    both = MOMENT_BYTES[settings.exp_avg_dtype] + MOMENT_BYTES[settings.exp_avg_sq_dtype]
    return both * (1.0 - _share_away(settings) if on_gpu else 1.0)


def _share_away(settings: Any) -> float:
    return settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0


def _activations(model: dict[str, Any], sizes: Sizes, stage: int, layers: list[int], options: Any) -> float:
    """Return the bytes of activations that a stage keeps: one micro-batch times the number in flight."""
    tokens = options.max_tokens_per_gpu  # of one context-parallel rank
    kinds = [(kept_per_token(model, sizes, alike[0]), len(alike)) for alike in _alike(model, layers)]
    if options.activation_checkpointing == "full":
        inputs = len(layers) * model["hidden_size"] / (sizes.tp if sizes.sequence_parallel else 1)
        one = _ACTIVATION * tokens * (inputs + max(kept for kept, _ in kinds))
    else:
        one = _ACTIVATION * tokens * sum(kept * count for kept, count in kinds)
    return one * _most_kept(stage, sizes.pp, sizes.vpp, options.num_micro_batches)


def _most_kept(stage: int, stages: int, chunks: int, micro_batches: int) -> float:
    """Return the most micro-batches whose activations a stage keeps at once, counted in whole stages.

    In Megatron's schedule a stage has this many forward passes before its first backward pass. Interleaved
    stages take micro-batches in groups of `stages`; the last group is filled up with idle work.
    """
    later = stages - stage - 1
    if chunks == 1:
        return min(later + 1, micro_batches)
    warm_up = 2 * later + (chunks - 1) * stages
    filled_up = -(-micro_batches // stages) * stages
    return min(warm_up + 1, filled_up * chunks) / chunks


def kept_per_token(model: dict[str, Any], sizes: Sizes, layer: int) -> float:
    """Return how many numbers a layer keeps per token for the backward pass."""
    hidden, (query, key_value) = model["hidden_size"], _attention_widths(model)
    split = sizes.tp if sizes.sequence_parallel else 1
    if has_experts(model, layer):
        # Each rank sends its tokens to their experts once; ranks that share an expert exchange tokens.
        each = 3 * _expert_width(model) + 2 * hidden * sizes.etp
        mlp = 3 * _shared_width(model) / sizes.tp + model["num_experts_per_tok"] * each / split
    else:
        mlp = 3 * model["intermediate_size"] / sizes.tp
    return 4 * hidden / split + (2 * (query + key_value) + query) / sizes.tp + mlp
