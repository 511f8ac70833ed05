"""What a run will cost, estimated from its settings and config.json: memory of a device, seconds of a step.

Memory counts weights, gradients, Adam and activations of the trainer, weights and KV cache of an engine.
Time takes the machine at a usual share of its peak, and answers of half the allowed length. Not covered:
fragmentation, buffers of collectives, what a Python process needs itself, a critic's or teacher's own pass.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from slime.arguments import Args
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.batch.flops import ModelShape
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.preflight.trainer_plan import (
    GIB,
    Sizes,
    kept_per_token,
    known_shape,
    layer_parameters,
    moment_bytes,
    outside_parameters,
    plan_trainer,
    read_model,
)
from slime.utils.machine.accelerator import device_count

# Operations in bfloat16 that one multiprocessor makes in a cycle, by compute capability.
_OPERATIONS = {8.0: 2048, 8.6: 512, 8.9: 512, 9.0: 4096, 10.0: 8192, 12.0: 1024}
_USUAL_GPU = 312e12  # where the one that is planned for is not here
_USED = 0.35  # share of the peak that training reaches
_BYTES_PER_OPERATION = 1 / 200  # memory bandwidth beside arithmetic, of most devices
_PROMPT = 128  # tokens, where nothing is known of the prompts
_STEP_S = 0.005  # of an engine or a micro-batch, however small the model
_LOGITS = 512 << 20  # one block of them with its gradient
_KV_SHARE, _KV_ON_CPU = 0.4, 256 << 20  # as the embedded engine takes it
_PROBE, _PROBES = 384, 32  # rows of the matrices whose product is timed, and how often
_PROCESS = 600 << 20  # Python with its libraries, which stands where the model is if there is no GPU


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Bytes by what they are for, on the device of one trainer rank and of one engine; seconds of a step.

    Example: RunPlan({"weights": 8e9, "gradients": 8e9}, {"weights": 4e9}, True, 12.0, 30.0) of a run whose
    trainer and engines take turns on a device. An empty dict: there is no trainer, or no engine of ours.
    """

    trainer: dict[str, float]
    engine: dict[str, float]
    take_turns: bool
    generate_s: float
    train_s: float
    copies: float = 0.0  # --peer-copies, in the shared memory of the machine

    @property
    def peak(self) -> float:
        """Bytes of the fullest device."""
        sides = sum(self.trainer.values()), sum(self.engine.values())
        both = self.trainer.get("weights", 0.0) + self.engine.get("weights", 0.0)  # while weights travel
        return max(*sides, both) if self.take_turns else max(sides)

    @property
    def step_s(self) -> float:
        return self.generate_s + self.train_s

    def lines(self, room: float | None) -> list[str]:
        """`room`: bytes of one device; None: not known."""
        sides = {"trainer rank": self.trainer, "engine": self.engine}
        shown = [
            f"{side}: {sum(parts.values()) / GIB:.2f} GiB ("
            + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
            + ")"
            for side, parts in sides.items()
            if parts
        ]
        if self.copies:
            shown.append(
                f"--peer-copies: {self.copies / GIB:.2f} GiB of shared memory, two copies of the state"
            )
        shown.append(
            f"a step: about {self.step_s:.3g} s (generate {self.generate_s:.3g}, train {self.train_s:.3g})"
        )
        if room is not None:
            verdict = "fits" if self.peak <= room else "does not fit"
            shown.append(f"{verdict}: {self.peak / GIB:.2f} GiB on a device of {room / GIB:.0f} GiB")
        return shown

    def against(self, seconds: float, trainer_bytes: float | None) -> str:
        """Predicted beside measured, in one line."""
        line = f"predicted against measured: a step {self.step_s:.3g} s, measured {seconds:.3g} s"
        if trainer_bytes and self.trainer:
            predicted = sum(self.trainer.values()) / GIB
            line += f"; memory of a trainer rank {predicted:.2f} GiB, measured {trainer_bytes / GIB:.2f} GiB"
        return line


@dataclass(frozen=True, slots=True)
class Device:
    """What a run is planned for: a GPU of so many bytes, or a machine without one."""

    room: float
    is_gpu: bool

    @classmethod
    def here(cls) -> Device:
        if device_count():
            return cls(float(torch.cuda.get_device_properties(0).total_memory), True)
        return cls(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), False)

    def item_bytes(self, args: Args) -> int:
        """Bytes of a number in the precision of the passes, as derived on this machine."""
        auto = args.dtype == "auto" or args.sources["dtype"].startswith("derived")
        if auto and self.is_gpu != bool(device_count()):
            return 2 if self.is_gpu else 4
        return 4 if args.dtype == "float32" or (args.dtype == "auto" and not self.is_gpu) else 2


def plan_run(args: Args, device: Device, prompt_tokens: float | None = None) -> RunPlan:
    """ValueError where the model's config.json is not here, or is of a kind that nobody knows."""
    assert args.hf_checkpoint is not None, "a plan is made from a model"
    with known_shape(f"--hf-checkpoint {args.hf_checkpoint}"):
        model = read_model(args.hf_checkpoint)
        shape = ModelShape.from_hf_config(_Config(model))
        trains, serves = not args.debug_rollout_only, not args.debug_train_only
        trainer = _trainer_memory(args, model, device) if trains else {}
        ours = serves and not args.rollout_external_engine_addrs
        engine = _engine_memory(args, model, device) if ours else {}
    copies = 0.0
    if args.peer_copies:
        # Of this machine: what its ranks write, and what the machine before it does.
        shares = (args.actor_num_gpus_per_node or 1) * (2 if args.actor_num_nodes > 1 else 1)
        copies = 2.0 * shares * (trainer.get("weights", 0.0) + trainer.get("optimizer", 0.0))
    if not device.is_gpu:
        trainer, engine = (side and side | {"process": float(_PROCESS)} for side in (trainer, engine))
    generate_s, train_s = _seconds(args, shape, device, prompt_tokens)
    seconds = generate_s if serves else 0.0, train_s if trains else 0.0
    return RunPlan(trainer, engine, bool(args.colocate), *seconds, copies)


class _Config(Namespace):
    """A config.json as `ModelShape` reads one of transformers."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(**values)

    def get_text_config(self) -> _Config:
        return self


def _tokens_at_once(args: Args) -> int:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return args.max_tokens_per_gpu
    answer = args.rollout_max_response_len or 512
    longest = args.rollout_max_context_len or (args.rollout_max_prompt_len or 512) + answer
    return args.micro_batch_size * longest // args.context_parallel_size


def _trainer_memory(args: Args, model: dict[str, Any], device: Device) -> dict[str, float]:
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if BACKENDS[args.train_backend].has_pipeline:
        sizes = Sizes(
            ranks,
            tp,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size or 1,
            cp,
            args.expert_model_parallel_size,
            args.expert_tensor_parallel_size or 1,
            bool(args.sequence_parallel),
        )
        micro = max(1, (args.global_batch_size or 1) // max(1, sizes.dp * args.micro_batch_size))
        options = Namespace(num_micro_batches=micro, max_tokens_per_gpu=_tokens_at_once(args))
        for name in (
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        ):
            setattr(options, name, getattr(args, name))
        options.activation_checkpointing, options.moe_load_max_over_mean = args.activation_checkpointing, 2.0
        worst = max(plan_trainer(model, sizes, options).stages, key=lambda stage: stage.total)
        parts = {"gradients": worst.gradients, "optimizer": worst.optimizer}
        parts = {name: value * _trained_share(args, model) for name, value in parts.items()}
        return {"weights": worst.weights, **parts, "activations": worst.activations}
    return _fsdp_memory(args, model, Sizes(ranks, tp, cp=cp), device)


def _trained_share(args: Args, model: dict[str, Any]) -> float:
    """The share of parameters that is trained; a matrix of m x n has adapters of rank x (m + n)."""
    return 2 * args.lora_rank / model["hidden_size"] if args.lora_rank else 1.0


def _fsdp_memory(args: Args, model: dict[str, Any], sizes: Sizes, device: Device) -> dict[str, float]:
    """FSDP keeps masters in float32, and gathers a layer at a time in the precision of the passes."""
    item, tokens = device.item_bytes(args), _tokens_at_once(args)
    layers = range(model["num_hidden_layers"])
    each = [layer_parameters(model, layer).total for layer in layers]
    outside = [parameters.total for parameters in outside_parameters(model).values()]
    held = (sum(each) + sum(outside)) / sizes.ranks
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


def _engine_memory(args: Args, model: dict[str, Any], device: Device) -> dict[str, float]:
    item, gpus = device.item_bytes(args), args.rollout_num_gpus_per_engine
    layers = model["num_hidden_layers"]
    parameters = sum(layer_parameters(model, layer).total for layer in range(layers))
    parameters += sum(part.total for part in outside_parameters(model).values())
    weights = item * parameters / gpus
    if ENGINES[args.rollout_engine].takes_sglang_flags:
        return {"weights": weights, "KV cache, as --sglang-mem-fraction-static leaves": 0.0}
    heads = model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    row = 2 * layers * item * width * (model.get("num_key_value_heads") or heads)
    context = model.get("max_position_embeddings") or 0
    budget = _KV_SHARE * max(0.0, device.room - weights) if device.is_gpu else float(_KV_ON_CPU)
    most = args.embedded_max_running_requests * context * row
    cache = (
        args.embedded_max_total_tokens * row if args.embedded_max_total_tokens else max(budget, context * row)
    )
    return {"weights": weights, "KV cache": float(min(cache, most))}


def _seconds(args: Args, shape: ModelShape, device: Device, prompt: float | None) -> tuple[float, float]:
    """Seconds to generate and to train one rollout."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    # Supervised rows hold their answers, and are measured with them.
    is_read = args.loss_type in SUPERVISED_LOSSES and prompt is not None
    answer = 0 if is_read else (args.rollout_max_response_len or 512) / 2
    prompt = prompt or _PROMPT
    tokens = samples * (answer + prompt)
    item = device.item_bytes(args)
    speed = _operations_per_second(item, device)
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    engines = max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)
    cores = ranks if device.is_gpu else 1  # ranks on one CPU share its cores
    passes = (
        4 + args.use_kl_loss + (args.activation_checkpointing == "full")
    )  # one before, and three to train
    micro = tokens / _tokens_at_once(args) if args.use_dynamic_batch_size else samples / args.micro_batch_size
    micro = max(micro / ranks, args.num_steps_per_rollout or 1)
    train = passes * (2 * shape.matrices * tokens / (speed * _USED * cores) + _STEP_S * micro)
    at_once = min(samples / engines, float(args.embedded_max_running_requests))
    reads = shape.matrices * item / (2 * speed * _BYTES_PER_OPERATION)
    one_token = _STEP_S + max(reads, 2 * shape.matrices * at_once / (speed * _USED))
    rounds = samples / engines / at_once
    return rounds * answer * one_token, train


def _operations_per_second(item: int, device: Device) -> float:
    """The rate of one GPU, from what it is; of this CPU, from a product of two small matrices."""
    if device.is_gpu and not device_count():
        return _USUAL_GPU / (1 if item == 2 else 8)
    if device.is_gpu:
        gpu = torch.cuda.get_device_properties(0)
        each = _OPERATIONS.get(gpu.major + gpu.minor / 10, 1024) / (1 if item == 2 else 8)
        return float(gpu.multi_processor_count * each * getattr(gpu, "clock_rate", 1_700_000) * 1000)
    matrix, best, threads = torch.ones(_PROBE, _PROBE), float("inf"), torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other programs run as well
    try:
        for _ in range(_PROBES):  # the fastest counts: others were interrupted
            started = time.perf_counter()
            matrix @ matrix
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * _PROBE**3 / max(best, 1e-6)
