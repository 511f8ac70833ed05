"""Models the cost of a step on many GPUs: generation, training and weight push, from sizes and rates.

`benchmarks/generation_costs.py` and `benchmarks/scaling.py` compare it with real steps; docs/performance.md
has the errors, and `slime simulate` prints the ASSUMPTIONS.
"""

from __future__ import annotations

import functools
import itertools
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from slime.batch.flops import ModelShape
from slime.catalog.gpus import MODELS, GpuRow, known_model
from slime.preflight.trainer_plan import (
    Sizes,
    known_shape,
    layer_parameters,
    layers_per_stage,
    number_of_experts,
    outside_parameters,
    plan_stages,
    read_model,
)

# Share of the matrix rate that a training step reaches, attention counted: 0.73 at width 2,560 and 0.56 at
# 1,024 (dense), and of that 0.73 with experts (six layers of Qwen3-30B-A3B: 0.51).
_SHARE_WIDE, _SHARE_PER_WIDTH, _SHARE_EXPERTS = 0.837, 280.0, 0.73
# One decode pass costs this much however little it computes: the scheduler, and kernels that wait for each
# other. Admitting a request interrupts the decode passes of all others.
_DECODE_S, _DECODE_LAYER_S, ADMIT_S = 1.25e-3, 14e-6, 6.2e-3
_DECODE_SHARE, _PREFILL_SHARE = 0.95, 0.74  # of the matrix rate
_CACHE_SHARE = 0.73  # share of the memory rate that attention reaches on the KV cache
_HOP_S = 12e-6  # one collective between GPUs of a machine; ten times that between machines
_BUSIEST_EXPERT = 2.0  # load of the busiest expert over the mean
_HIDDEN = 0.7  # share of gradient and parameter traffic hidden by the backward pass
_ROOM, _TRAINER_ROOM = 0.88, 0.92  # share of a GPU's memory for an engine or a trainer
# Bytes per second of a push on one machine; with more it grows as the square root of their number.
PUSH_RATES = {"same GPU": 60e9, "shared GPUs": 9e9, "broadcast": 8e9}
_PUSH_S, PAUSE_S = 0.9, 0.13  # PAUSE_S: for how long engines are paused in it
SWAP_S = 2.0  # hand-over of the device between engine and trainer, both ways
_MAX_RUNNING = 256
_LONG = 16_384  # tokens; shorter samples are not split by context parallelism

ASSUMPTIONS = (
    "training: (0.837 - 280 / width) of the matrix rate with attention counted, 0.73 of that with experts",
    "decode: 1.25 ms + 14 us per layer + the slower of weights and products + KV cache (0.73 of memory rate)",
    "an engine takes at most 256 requests at a time, and 6.2 ms to admit one",
    "GPUs that work together: rates of one GPU / 2.2 from 16 GPUs on, and / 1.9 on 8",
    "collectives of tensor and expert parallelism are not hidden; 70 % of gradient and parameter traffic is",
    "the busiest expert has 2 times the mean load; pipeline bubble (pp - 1) / (micro-batches + pp - 1)",
    "a push: 0.9 s + bytes at 60 GB/s on one GPU; on m machines 9 (in turns) or 8 GB/s x sqrt(m)",
    "rewards take no time; response lengths are log-normal unless said otherwise; bf16 everywhere",
)


@dataclass(frozen=True, slots=True)
class Work:
    """One rollout. `spread`: sigma of the logarithm of response lengths; 0: all have the mean.

    `passes`: without gradients before training (old policy, reference).
    """

    samples: int
    prompt: float
    answer: float
    spread: float = 0.8
    longest: float = math.inf
    passes: int = 1
    optimizer_steps: int = 1
    siblings: int = 1  # samples per prompt; an engine computes the prompt once

    def lengths(self) -> Sequence[float]:
        """Return response lengths at equally likely quantiles, scaled to the given mean."""
        return _lengths(self.answer, self.spread, self.longest)

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompt + self.answer)


@functools.lru_cache(maxsize=256)
def _lengths(mean: float, spread: float, longest: float, count: int = 64) -> tuple[float, ...]:
    if not spread:
        return (mean,) * count
    places = [math.exp(spread * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    scale = mean / (sum(places) / count)
    for _ in range(8):  # truncated lengths make the others longer
        scale *= mean / (sum(min(longest, scale * place) for place in places) / count)
    return tuple(min(longest, scale * place) for place in places)


class Model:
    """Numbers of a config.json that determine costs."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        shape = ModelShape.from_hf_config(_Config(config))
        self.matrices, self.attention = shape.matrices, shape.attention
        layers = config["num_hidden_layers"]
        each = [layer_parameters(config, layer) for layer in range(layers)]
        outside = list(outside_parameters(config).values())
        self.parameters = sum(p.total for p in (*each, *outside))
        self.expert_parameters = sum(p.experts for p in each)
        self.layers, self.hidden = layers, config["hidden_size"]
        self.experts, self.chosen = number_of_experts(config), config.get("num_experts_per_tok") or 0
        if config.get("kv_lora_rank"):
            cached = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            heads = config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // heads
            cached = 2 * (config.get("num_key_value_heads") or heads) * width
        self.cache_bytes = 2.0 * layers * cached  # bytes per token, bf16

    @property
    def share(self) -> float:
        """Return the share of the matrix rate that training reaches."""
        dense = max(0.2, _SHARE_WIDE - _SHARE_PER_WIDTH / self.hidden)
        return dense * (_SHARE_EXPERTS if self.experts else 1.0)

    def forward_flops(self, lengths: Sequence[float]) -> float:
        return sum(2 * self.matrices * n + self.attention * n * n for n in lengths)


class _Config(Namespace):
    def __init__(self, values: dict[str, Any]):
        super().__init__(**values)

    def get_text_config(self) -> _Config:
        return self


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine on `gpus` GPUs; `decode_s` and `prefill_s` as modelled engines ask for them."""

    model: Model
    gpu: GpuRow
    gpus: int
    max_running: int

    def decode_s(self, running: int, cached: float) -> float:
        model, gpu, own = self.model, self.gpu, self.gpus
        touched = 1 - (1 - model.chosen / model.experts) ** running if model.experts else 1.0
        weights = 2 * (model.parameters - (1 - touched) * model.expert_parameters)
        read = weights / (own * gpu.memory)
        products = 2 * model.matrices * running / (own * gpu.flops * _DECODE_SHARE)
        caches = cached * model.cache_bytes / (own * gpu.memory * _CACHE_SHARE)
        overhead = _DECODE_S + model.layers * (_DECODE_LAYER_S + self._talk_s(running))
        return overhead + max(read, products) + caches

    def _talk_s(self, tokens: float) -> float:
        if self.gpus == 1:
            return 0.0
        near = self.gpus <= self.gpu.per_node
        rate, hop = (self.gpu.link, _HOP_S) if near else (self.gpu.network, 10 * _HOP_S)
        return 2 * (hop + 4 * self.model.hidden * tokens / rate)

    def prefill_s(self, tokens: float) -> float:
        per_token = 2 * self.model.matrices / (self.gpus * self.gpu.flops * _PREFILL_SHARE)
        talk = (self._talk_s(4096) / 4096 if self.gpus > 1 else 0.0) * self.model.layers
        return tokens * (per_token + talk)

    def generate_s(self, work: Work, samples: float) -> float:
        """Return the seconds for requests that are sent at once, until the longest response ends."""
        lengths = sorted(work.lengths())
        running = min(float(self.max_running), samples)
        cached = work.prompt + sum(lengths) / len(lengths) / 2
        seconds = self.prefill_s(samples / work.siblings * work.prompt) + samples * ADMIT_S
        waiting = samples - running
        seconds += waiting * work.answer / running * self.decode_s(int(running), running * cached)
        before = 0.0
        for i, length in enumerate(lengths):
            left = running * (1 - i / len(lengths))
            context = work.prompt + (before + length) / 2
            seconds += (length - before) * self.decode_s(max(1, round(left)), left * context)
            before = length
        return seconds


def engine_plans(model: Model, gpu: GpuRow, work: Work, *, most: int) -> Iterator[EnginePlan]:
    """Yield engine sizes whose weights fit and leave room for caches."""
    for gpus in (1, 2, 4, 8, 16, 32):
        room = _ROOM * gpu.capacity * gpus - 2 * model.parameters
        each = model.cache_bytes * (work.prompt + max(work.lengths()))
        if gpus <= most and room > each and model.config["num_attention_heads"] % gpus == 0:
            yield EnginePlan(model, gpu, gpus, max(1, min(_MAX_RUNNING, int(room / each))))


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """A layout, and the seconds of one rollout's training by purpose."""

    sizes: Sizes
    parts: dict[str, float]
    memory: float  # bytes on the fullest rank
    recompute: bool

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        s = self.sizes
        recompute = ", recompute" if self.recompute else ""
        return f"tp {s.tp}, pp {s.pp}, cp {s.cp}, ep {s.ep}, dp {s.dp}{recompute}"


def train_plan(
    model: Model,
    gpu: GpuRow,
    sizes: Sizes,
    work: Work,
    *,
    tokens_at_once: int = 16_384,
    recompute: bool = False,
) -> TrainPlan:
    """Plan the training under a layout; ValueError if the model cannot be split like this."""
    lengths = [work.prompt + n for n in work.lengths()]
    forward = model.forward_flops(lengths) / len(lengths) * work.samples
    passes = work.passes + 3 + recompute
    local = work.tokens / (sizes.dp * sizes.cp)  # tokens per rank
    micro = max(1, round(local / work.optimizer_steps / tokens_at_once))
    options = Namespace(
        num_micro_batches=min(micro, 2 * sizes.pp),  # enough to fill the pipeline
        max_tokens_per_gpu=tokens_at_once,
        optimizer_cpu_offload=False,
        optimizer_offload_fraction=0.0,
        exp_avg_dtype="fp32",
        exp_avg_sq_dtype="fp32",
        activation_checkpointing="full" if recompute else "none",
    )
    stages = plan_stages(model.config, sizes, options)
    compute = passes * forward / (sizes.ranks * gpu.flops * model.share)
    parts = {"compute": compute}
    if model.experts:
        imbalance = expert_imbalance(model.experts, sizes.ep, _BUSIEST_EXPERT)
        parts["expert imbalance"] = compute * (imbalance - 1) * 2 / 3  # share that experts compute
    talks = 2 * (passes - work.passes) / 3 * 2 + work.passes * 2  # all-reduces of a layer
    if sizes.tp > 1:
        rate = gpu.link if sizes.tp <= gpu.per_node else gpu.network
        tokens = local * model.layers / sizes.pp
        parts["tensor parallel"] = talks * tokens * 4 * model.hidden * (1 - 1 / sizes.tp) / rate
    if sizes.ep > 1:
        rate = gpu.link if sizes.ep * sizes.tp <= gpu.per_node else gpu.network
        copies = model.chosen if rate == gpu.link else min(model.chosen, 4)
        tokens = local * model.layers / sizes.pp / sizes.tp
        parts["expert parallel"] = talks * tokens * 2 * model.hidden * copies * (1 - 1 / sizes.ep) / rate
    if sizes.ranks > 1:
        held = max(stage.parameters for stage in stages)
        rate = gpu.link if sizes.ranks <= gpu.per_node else gpu.network
        parts["gradients"] = work.optimizer_steps * held * 6 / rate * (1 - _HIDDEN)
    if sizes.pp > 1:
        layers = layers_per_stage(sizes, model.layers)
        parts["uneven stages"] = sum(parts.values()) * (max(map(len, layers)) * sizes.pp / model.layers - 1)
        busy = sum(parts.values())
        parts["pipeline bubble"] = busy * (sizes.pp - 1) / micro
    stepped = max(stage.optimizer for stage in stages)
    parts["optimizer"] = work.optimizer_steps * 2 * stepped / gpu.memory
    return TrainPlan(sizes, parts, max(stage.total for stage in stages), recompute)


def expert_imbalance(experts: int, ranks: int, busiest: float) -> float:
    """Return the work of the busiest expert-parallel rank over the mean; `busiest`: that of single experts.

    Loads are taken as independent: a rank with many experts evens them out. It is 1 with one rank and
    `busiest` with one expert per rank.
    """
    if ranks == 1:
        return 1.0
    return 1.0 + (busiest - 1.0) * _largest_of(ranks) / _largest_of(experts) / math.sqrt(experts / ranks)


def _largest_of(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def layouts(model: Model, gpu: GpuRow, ranks: int, work: Work) -> Iterator[Sizes]:
    """Keep layouts whose weights and gradients fit and that have a sample per replica in every step."""
    dense = model.parameters - model.expert_parameters
    replicas = work.samples // work.optimizer_steps
    contexts = (1, 2, 4, 8) if max(work.lengths()) > _LONG else (1,)
    choices = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), contexts, (1, 4, 8, 16, 32, 64))
    for tp, pp, cp, ep in choices:
        if ranks % (tp * pp * cp) or ranks % (ep * pp) or (ep > 1 and not model.experts):
            continue
        fits = 6 * (dense / tp + model.expert_parameters / ep) / pp < _TRAINER_ROOM * gpu.capacity
        if fits and ranks // (tp * pp * cp) <= replicas:
            sizes = Sizes(ranks, tp, pp, 1, cp, ep, 1, tp > 1)
            yield replace(sizes, layers=uneven_stages(model.layers, pp))


def uneven_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return shares that differ on the last stage alone: 61 layers on 16 stages are 15 times 4 and 1."""
    each = -(-layers // pp)
    if layers % pp == 0 or layers <= (pp - 1) * each:
        return ()
    return (*[each] * (pp - 1), layers - (pp - 1) * each)


@functools.lru_cache(maxsize=4096)
def best_training(model: Model, gpu: GpuRow, ranks: int, work: Work) -> TrainPlan | None:
    """Return the fastest layout of the training; None: no layout fits into memory."""
    found: TrainPlan | None = None
    for sizes in layouts(model, gpu, ranks, work):
        for recompute in (False, True):
            try:
                plan = train_plan(model, gpu, sizes, work, recompute=recompute)
            except ValueError:
                break
            if plan.memory <= _TRAINER_ROOM * gpu.capacity:
                found = plan if found is None or plan.seconds < found.seconds else found
                break  # recomputing what fits only costs time
    return found


def push_seconds(model: Model, gpu: GpuRow, gpus: int, *, apart: bool) -> float:
    way = "broadcast" if apart else "same GPU" if gpus == 1 else "shared GPUs"
    machines = max(1.0, gpus / gpu.per_node)
    return _PUSH_S + 2 * model.parameters / (PUSH_RATES[way] * math.sqrt(machines))


def model_of(name: str) -> Model:
    """Return a model of the catalog or of a folder; ValueError if its costs cannot be computed."""
    with known_shape(f"--model {name}"):
        return Model(model_config(name))


def model_config(name: str) -> dict[str, Any]:
    """Return the config of a model of the catalog or of a folder."""
    if (row := known_model(name)) is not None:
        return row
    if (Path(name) / "config.json").is_file():
        return read_model(name)
    raise ValueError(
        f"--model {name!r} is no folder with a config.json and none of {', '.join(MODELS)}: name one of them "
        "with --model, whatever --hf-checkpoint is."
    )
