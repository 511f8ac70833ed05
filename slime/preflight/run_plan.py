"""Estimates a run's device memory and seconds per step from its settings and config.json.

Unless the caller knows better, responses have half the allowed length on average, and the longest all of it.
Not covered: fragmentation, buffers of collectives, what a Python process needs, a critic's or teacher's pass.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.arguments import Args
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.backends.shared.model_roles import needs_old_log_probs, needs_reference
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.catalog.gpus import closest_gpu, known_model
from slime.catalog.limits import limit
from slime.preflight.step_costs import EnginePlan, Model, Work, push_seconds, train_plan
from slime.preflight.trainer_plan import (
    GIB,
    Sizes,
    kept_per_token,
    known_shape,
    layer_parameters,
    moment_bytes,
    outside_parameters,
    plan_stages,
    read_model,
)
from slime.utils.machine.accelerator import device_count, gpu
from slime.utils.models.pipeline_stages import layers_of_chunks

_USED = 0.35  # share of a CPU's peak that training reaches
_BYTES_PER_OPERATION = 1 / 200  # memory bandwidth of a CPU relative to its arithmetic
_PROMPT = 128  # tokens, where nothing is known of the prompts
_STEP_S = 0.005  # of an engine or a micro-batch, however small the model
_LOGITS = 512 << 20  # one block of them with its gradient
_KV_SHARE, _KV_ON_CPU = 0.4, 256 << 20  # as the embedded engine takes it
_PROBE, _PROBES = 384, 32  # rows of the matrices whose product is timed, and how often
_PROCESS = 600 << 20  # Python with its libraries, in the same memory as the model if there is no GPU


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Bytes by purpose, on the device of one trainer rank and of one engine, and seconds of a step.

    Example: RunPlan({"weights": 8e9, "gradients": 8e9}, {"weights": 4e9}, True, 12.0, 30.0) of a run whose
    trainer and engines take turns on a device. An empty dict: there is no trainer, or no engine of ours.
    """

    trainer: dict[str, float]
    engine: dict[str, float]
    take_turns: bool
    generate_s: float
    train_s: float
    push_s: float = 0.0  # time of a weight push; 0: nothing is pushed, or it is unknown
    response_tokens: float = 0.0  # mean length that the seconds assume; 0: the run generates nothing
    copies: float = 0.0  # --peer-copies, in the shared memory of the machine

    @property
    def peak(self) -> float:
        """Return the bytes of the fullest device."""
        sides = sum(self.trainer.values()), sum(self.engine.values())
        both = self.trainer.get("weights", 0.0) + self.engine.get("weights", 0.0)  # while weights travel
        return max(*sides, both) if self.take_turns else max(sides)

    @property
    def step_s(self) -> float:
        return self.generate_s + self.train_s + self.push_s

    def lines(self, room: float | None) -> list[str]:
        """`room`: bytes of one device; None: not known."""
        shown = []
        for side, parts in {"trainer rank": self.trainer, "engine": self.engine}.items():
            each = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
            if parts:
                shown.append(f"{side}: {sum(parts.values()) / GIB:.2f} GiB ({each})")
        if self.copies:
            shown.append(
                f"--peer-copies: {self.copies / GIB:.2f} GiB of shared memory, two copies of the state"
            )
        seconds = {"generate": self.generate_s, "train": self.train_s, "push": self.push_s}
        known = ", ".join(f"{name} {value:.3g}" for name, value in seconds.items() if value)
        assumed = f" for responses of {self.response_tokens:.0f} tokens" if self.response_tokens else ""
        shown.append(f"a step: about {self.step_s:.3g} s ({known}){assumed}")
        if room is not None:
            verdict = "fits" if self.peak <= room else "does not fit"
            shown.append(f"{verdict}: {self.peak / GIB:.2f} GiB on a device of {room / GIB:.0f} GiB")
        return shown

    def against(self, seconds: float, trainer_bytes: float | None, response_tokens: float | None) -> str:
        """Return one line that compares the prediction with the measured step, memory and response length."""
        line = f"predicted against measured: a step {self.step_s:.3g} s, measured {seconds:.3g} s"
        if trainer_bytes and self.trainer:
            predicted = sum(self.trainer.values()) / GIB
            line += f"; memory of a trainer rank {predicted:.2f} GiB, measured {trainer_bytes / GIB:.2f} GiB"
        if response_tokens and self.response_tokens:
            line += f"; responses of {self.response_tokens:.0f} tokens, measured {response_tokens:.0f}"
        return line


@dataclass(frozen=True, slots=True)
class Device:
    """The planned hardware: a GPU with `room` bytes and, if known, a name; or a machine without one."""

    room: float
    is_gpu: bool
    name: str = ""

    @classmethod
    def here(cls) -> Device:
        if device_count():
            found = gpu.get_device_properties(0)
            return cls(float(found.total_memory), True, found.name)
        return cls(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), False)

    def item_bytes(self, args: Args) -> int:
        """Bytes of a number in the precision of the passes, as derived on this machine."""
        auto = args.dtype == "auto" or args.sources["dtype"].startswith("derived")
        if auto and self.is_gpu != bool(device_count()):
            return 2 if self.is_gpu else 4
        return 4 if args.dtype == "float32" or (args.dtype == "auto" and not self.is_gpu) else 2


def plan_run(
    args: Args, device: Device, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> RunPlan:
    """Estimate a run; ValueError if its model is neither on this machine nor in the catalog."""
    assert args.hf_checkpoint is not None, "a plan needs a model"
    work = _work(args, prompt_tokens, response_tokens)
    trains, serves = not args.debug_rollout_only, not args.debug_train_only
    with known_shape(f"--hf-checkpoint {args.hf_checkpoint}"):
        known = None if Path(args.hf_checkpoint).exists() else known_model(args.hf_checkpoint)
        model = known or read_model(args.hf_checkpoint)
        trainer = _trainer_memory(args, model, device) if trains else {}
        ours = serves and not args.rollout_external_engine_addrs
        engine = _engine_memory(args, model, device) if ours else {}
        seconds = _gpu_seconds if device.is_gpu else _cpu_seconds
        generate_s, train_s, push_s = seconds(args, model, device, work)
    copies = 0.0
    if args.peer_copies:
        # This machine holds the copies of its own ranks and of its predecessor's.
        shares = (args.actor_num_gpus_per_node or 1) * (2 if args.actor_num_nodes > 1 else 1)
        copies = 2.0 * shares * (trainer.get("weights", 0.0) + trainer.get("optimizer", 0.0))
    if not device.is_gpu:
        trainer, engine = (side and side | {"process": float(_PROCESS)} for side in (trainer, engine))
    return RunPlan(
        trainer,
        engine,
        bool(args.colocate),
        generate_s if serves else 0.0,
        train_s if trains else 0.0,
        push_s if serves and trains else 0.0,
        work.answer if serves else 0.0,
        copies,
    )


def _work(args: Args, prompt: float | None, response: float | None) -> Work:
    """Return the work of one rollout. Supervised rows hold their responses and are measured with them."""
    steps = args.num_steps_per_rollout or 1
    longest = float(args.rollout_max_response_len or 512)
    is_read = args.loss_type in SUPERVISED_LOSSES and prompt is not None
    mean = 0.0 if is_read else min(response or longest / 2, longest)
    return Work(
        args.rollout_batch_size * args.n_samples_per_prompt,
        prompt or _PROMPT,
        mean,
        longest=longest,
        passes=needs_old_log_probs(args, steps) + needs_reference(args),
        optimizer_steps=steps,
        siblings=args.n_samples_per_prompt,
    )


def _tokens_at_once(args: Args) -> int:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return args.max_tokens_per_gpu
    answer = args.rollout_max_response_len or 512
    longest = args.rollout_max_context_len or (args.rollout_max_prompt_len or 512) + answer
    return args.micro_batch_size * longest // args.context_parallel_size


def _trainer_memory(args: Args, model: dict[str, Any], device: Device) -> dict[str, float]:
    sizes = _sizes(args, model["num_hidden_layers"])
    if BACKENDS[args.train_backend].has_pipeline:
        micro = max(1, (args.global_batch_size or 1) // max(1, sizes.dp * args.micro_batch_size))
        settings = args.to_dict() | {"max_tokens_per_gpu": _tokens_at_once(args)}
        options = Namespace(**settings, num_micro_batches=micro)
        worst = max(plan_stages(model, sizes, options), key=lambda stage: stage.total)
        parts = {"gradients": worst.gradients, "optimizer": worst.optimizer}
        parts = {name: value * _trained_share(args, model) for name, value in parts.items()}
        return {"weights": worst.weights, **parts, "activations": worst.activations}
    return _fsdp_memory(args, model, sizes, device)


def _sizes(args: Args, layers: int) -> Sizes:
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if not BACKENDS[args.train_backend].has_pipeline:
        return Sizes(ranks, tp, cp=cp)
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return Sizes(
        ranks,
        tp,
        pp,
        vpp,
        cp,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size or 1,
        bool(args.sequence_parallel),
        layers=tuple(layers_of_chunks(layers, pp, vpp, args.megatron_config)),
    )


def _trained_share(args: Args, model: dict[str, Any]) -> float:
    """Return the share of trained parameters; a matrix of m x n has adapters of rank x (m + n)."""
    return 2 * args.lora_rank / model["hidden_size"] if args.lora_rank else 1.0


def _fsdp_memory(args: Args, model: dict[str, Any], sizes: Sizes, device: Device) -> dict[str, float]:
    """Return bytes by purpose: FSDP keeps masters in fp32, and gathers a layer in the passes' precision."""
    item, tokens = device.item_bytes(args), _tokens_at_once(args)
    layers = range(model["num_hidden_layers"])
    each = [layer_parameters(model, layer).total for layer in layers]
    outside = [parameters.total for parameters in outside_parameters(model).values()]
    sharing = args.fsdp_shard_size * sizes.tp if args.fsdp_shard_size else sizes.ranks
    held = (sum(each) + sum(outside)) / sharing
    trained = held * _trained_share(args, model)
    alone = sizes.ranks == 1
    copy = item * (held if alone and item != 4 else 0.0 if alone else 2 * max(*each, *outside) / sizes.tp)
    kept = [kept_per_token(model, sizes, layer) for layer in layers]
    if args.activation_checkpointing == "full":
        kept = [max(kept), len(kept) * model["hidden_size"]]
    logits = min(float(_LOGITS), 8.0 * tokens * model["vocab_size"])
    moments = moment_bytes(args, on_gpu=device.is_gpu)
    parts = {"weights": 4 * held, "gradients": 4 * trained, "optimizer": moments * trained}
    if args.fsdp_cpu_offload and device.is_gpu:
        parts = {}
    return {**parts, "copy": copy, "activations": item * tokens * sum(kept) + logits}


def _engine_memory(args: Args, config: dict[str, Any], device: Device) -> dict[str, float]:
    item, model = device.item_bytes(args), Model(config)
    how = config.get("quantization_config") or {}
    fp8 = args.rollout_quantization == "fp8" or how.get("quant_method") == "fp8"
    weights = (1 if fp8 else item) * model.parameters / args.rollout_num_gpus_per_engine
    if ENGINES[args.rollout_engine].takes_sglang_flags:
        return {"weights": weights, "KV cache, as --sglang-mem-fraction-static leaves": 0.0}
    row = item * model.cache_bytes / 2
    context = config.get("max_position_embeddings") or 0
    budget = _KV_SHARE * max(0.0, device.room - weights) if device.is_gpu else float(_KV_ON_CPU)
    cache = limit(args, "embedded-tokens") * row or max(budget, context * row)
    return {
        "weights": weights,
        "KV cache": float(min(cache, limit(args, "embedded-requests") * context * row)),
    }


def _gpu_seconds(
    args: Args, config: dict[str, Any], device: Device, work: Work
) -> tuple[float, float, float]:
    """Return the seconds to generate, to train and to push one rollout, by the cost model of GPUs."""
    model = Model(config)
    sizes = _sizes(args, model.layers)
    recompute = args.activation_checkpointing == "full"
    rollout_gpus = args.rollout_num_gpus or (sizes.ranks if args.colocate else 1)
    gpus = max(sizes.ranks, rollout_gpus) if args.colocate else sizes.ranks + rollout_gpus
    gpu = closest_gpu(device.name, device.room).among(gpus)
    engines = max(1, rollout_gpus // args.rollout_num_gpus_per_engine)
    samples = work.samples / engines
    engine = EnginePlan(
        model, gpu, args.rollout_num_gpus_per_engine, max(1, round(min(_running(args), samples)))
    )
    plan = train_plan(model, gpu, sizes, work, tokens_at_once=_tokens_at_once(args), recompute=recompute)
    # Frozen matrices have no gradient of their own: the backward pass has one product instead of two.
    passes = work.passes + 3 + recompute
    saved = plan.parts["compute"] / passes if args.lora_rank else 0.0
    launches = _STEP_S * passes * _micro_batches(args, work) / sizes.ranks
    push = push_seconds(model, gpu, gpus, apart=not args.colocate)
    generate = engine.generate_s(work, samples) if work.answer else 0.0
    return generate, max(plan.seconds - saved, launches), push


def _running(args: Args) -> int:
    """Return the most requests that one engine computes at a time."""
    if ENGINES[args.rollout_engine].takes_sglang_flags:
        return args.sglang_server_concurrency
    return limit(args, "embedded-requests")


def _micro_batches(args: Args, work: Work) -> float:
    if args.use_dynamic_batch_size:
        count = work.tokens / _tokens_at_once(args)
    else:
        count = work.samples / args.micro_batch_size
    return max(count, work.optimizer_steps)


def _cpu_seconds(
    args: Args, config: dict[str, Any], device: Device, work: Work
) -> tuple[float, float, float]:
    """Return the seconds of a step on one CPU, whose cores all ranks share; its push time is negligible."""
    matrices = Model(config).matrices
    item = device.item_bytes(args)
    speed = _cpu_operations_per_second()
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    engines = max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)
    passes = work.passes + 3 + (args.activation_checkpointing == "full")
    micro = _micro_batches(args, work) / ranks
    train = passes * (2 * matrices * work.tokens / (speed * _USED) + _STEP_S * micro)
    at_once = min(work.samples / engines, float(_running(args)))
    reads = matrices * item / (2 * speed * _BYTES_PER_OPERATION)
    one_token = _STEP_S + max(reads, 2 * matrices * at_once / (speed * _USED))
    rounds = work.samples / engines / at_once
    return rounds * work.answer * one_token, train, 0.0


def _cpu_operations_per_second() -> float:
    """Time the product of two small matrices on this CPU."""
    matrix, best, threads = torch.ones(_PROBE, _PROBE), float("inf"), torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
    try:
        for _ in range(_PROBES):  # the fastest run counts: others were interrupted
            started = time.perf_counter()
            matrix @ matrix
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * _PROBE**3 / max(best, 1e-6)
