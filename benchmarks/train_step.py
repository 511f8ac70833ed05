"""How much of one GPU does a training step use, and what does each part of it cost?

Random weights of Qwen3 shapes, responses with long-tail lengths packed without padding, one on-policy GRPO
step (forward with log-probs and entropy, loss, backward, AdamW on fp32 master weights). In the same call: the
matrix rate of the machine, a naive transformers step (SDPA, full recomputation) and a plain step with
compiled layers, both on uniform rows of 2,048 tokens with 16-bit optimizer state. Also the log-prob kernel
against the bare matrix products, and the balance of work over eight ranks. Each part fails on its own.

    python benchmarks/train_step.py [--part kernels --part 0.6b --part 4b --part balance] [--profile]
    python benchmarks/train_step.py --part moe --part glm      # layers of mixtures of experts
    python benchmarks/train_step.py --part experts --part moe --fp8 --no-references    # FP8 against 16 bits
    python benchmarks/train_step.py --part long --checkpointing full    # 4B, one sample of 65,536 tokens
    python benchmarks/train_step.py --backend megatron --part 0.6b --part 4b    # Megatron beside FSDP
    python benchmarks/train_step.py --part 4b --fp8     # with --fp8-training too, after the 16-bit step
    python benchmarks/train_step.py --device cpu --tiny        (does the script work?)
"""

import argparse
import functools
import importlib
import json
import logging
import math
import socket
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kernel_times import profile_step
from measuring import as_a_trainer, free_memory, matrix_rate, peak_gib, present_device, seconds, synchronize
from shapes import MIXTURES, config_of
from torch.utils.checkpoint import checkpoint

from slime.algorithms.logprobs import chunked_log_probs
from slime.arguments import default_args
from slime.backends.experts.experts_operator import gated_experts
from slime.batch.convert import samples_to_batch
from slime.batch.flops import ModelShape, Stream, pass_flops
from slime.batch.split import plan_steps, split_for_ranks
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample

MODELS = ("0.6b", "4b", "moe", "glm", "long")
PARTS = ("kernels", "experts", *MODELS, "balance")
# Tokens of one micro-batch, and of one optimizer step: a little more than a whole part of it, because samples
# never fill micro-batches to the last token, and one more micro-batch would be needed for what is left.
TOKENS = {
    "0.6b": (66560, 131072),
    "4b": (16640, 65536),
    "moe": (33280, 65536),
    "glm": (33280, 65536),
    "long": (65536, 65536),
    "tiny": (256, 512),
    "tiny-moe": (256, 512),
}
Record = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="run this part (again for more); default: all"
    )
    parser.add_argument(
        "--device", type=present_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes: checks the script, measures nothing"
    )
    parser.add_argument(
        "--backend", default="fsdp", choices=("fsdp", "megatron"), help="megatron: both, one after another"
    )
    parser.add_argument("--fp8", action="store_true", help="also with --fp8-training")
    parser.add_argument("--steps", type=int, default=3, help="measured optimizer steps")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens of one micro-batch of our step")
    parser.add_argument(
        "--only-on-policy", action="store_true", help="leave out the step with an old-policy pass"
    )
    parser.add_argument("--checkpointing", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--no-references", action="store_true", help="leave out the naive and the plain compiled step"
    )
    parser.add_argument(
        "--profile", action="store_true", help="where the GPU's time goes in one of our steps"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/train_step.json"))
    return parser.parse_args()


# -- log-prob kernel -----------------------------------------------------------------------------------------


def kernel_part(options: argparse.Namespace, device: torch.device) -> list[Record]:
    tokens, vocab, widths = (16384, 151936, (2560, 1024)) if not options.tiny else (64, 512, (32,))
    return [_kernel_ratios(tokens, vocab, width, device) for width in widths]


def _kernel_ratios(tokens: int, vocab: int, width: int, device: torch.device) -> Record:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    direction = torch.randn(tokens, device=device)
    free_memory(device)

    def bare_forward() -> None:
        with torch.no_grad():
            hidden @ weight.T

    def bare_products() -> None:
        with torch.no_grad():
            logits = hidden @ weight.T
            logits @ weight
            logits.T @ hidden

    def forward() -> None:
        with torch.no_grad():
            chunked_log_probs(hidden, weight, targets, with_entropy=True)

    def both(entropy_grad: bool = False) -> None:
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=True)
        total = direction @ log_probs + (direction @ entropy if entropy_grad else 0.0)
        torch.autograd.grad(total, (hidden, weight))

    time_of = functools.partial(seconds, device=device)
    record: Record = {"tokens": tokens, "vocabulary": vocab, "width": width}
    record["bare_forward_ms"] = 1e3 * time_of(bare_forward)
    record["bare_products_ms"] = 1e3 * time_of(bare_products)
    free_memory(device)
    before = peak_gib(device)
    record["forward_ms"] = 1e3 * time_of(forward)
    record["forward_extra_gib"] = peak_gib(device) - before
    free_memory(device)
    record["both_ms"] = 1e3 * time_of(both)
    gradients = (hidden.nbytes + weight.nbytes) / 2**30
    record["both_extra_gib"] = peak_gib(device) - before - gradients
    record["both_with_entropy_grad_ms"] = 1e3 * time_of(functools.partial(both, True))
    record["forward_ratio"] = record["forward_ms"] / record["bare_forward_ms"]
    record["both_ratio"] = record["both_ms"] / record["bare_products_ms"]
    return record


# -- experts -------------------------------------------------------------------------------------------------


def experts_part(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """The experts of one layer of Qwen3-30B-A3B, forward and backward, in 16 bits and in FP8."""
    tokens, experts, top_k, width, inner = (
        (33280, 128, 8, 2048, 768) if not options.tiny else (64, 4, 2, 64, 32)
    )
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, size: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, device=device, generator=generator) * size
        return values.to(torch.bfloat16).requires_grad_()

    hidden = drawn(tokens, width)
    gate_up = drawn(experts, 2 * inner, width, size=width**-0.5)
    down = drawn(experts, width, inner, size=inner**-0.5)
    scores = torch.randn(tokens, experts, device=device, generator=generator)
    weights, chosen = scores.softmax(1).topk(top_k)
    weights = weights.to(torch.bfloat16).requires_grad_()
    direction = drawn(tokens, width).detach()
    leaves = [hidden, gate_up, down, weights]

    def forward(fp8: bool) -> torch.Tensor:
        return gated_experts(hidden, gate_up, down, chosen, weights, fp8)

    def both(fp8: bool) -> None:
        torch.autograd.grad(forward(fp8), leaves, direction)

    record: Record = {"tokens": tokens, "experts": experts, "width": width, "inner": inner}
    operations = 6 * 3 * tokens * top_k * width * inner
    for name, fp8 in (("bf16", False), ("fp8", True)):
        free_memory(device)
        record[f"{name}_forward_ms"] = 1e3 * seconds(functools.partial(forward, fp8), device=device)
        spent = seconds(functools.partial(both, fp8), device=device)
        record[f"{name}_both_ms"], record[f"{name}_tflops"] = 1e3 * spent, operations / spent / 1e12
    record["fp8_speed"] = record["bf16_both_ms"] / record["fp8_both_ms"]
    if options.profile:
        record["profile"] = profile_step(functools.partial(both, True), device)
    return [record]


# -- models --------------------------------------------------------------------------------------------------


def parameter_count(config: Any) -> int:
    """Parameters that a token meets: of a mixture, those of the experts that it chooses."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    chosen, experts = getattr(config, "num_experts_per_tok", 1), getattr(config, "num_local_experts", 1)
    return sum(
        p.numel() * chosen // experts if p.dim() == 3 else p.numel()
        for name, p in lm.named_parameters()
        if config.tie_word_embeddings or "embed_tokens" not in name
    )


def plain_step(shape: str, device: torch.device, *, compiled: bool, recompute: bool, options: Any) -> Record:
    """The reference: uniform rows, 16-bit weights and optimizer
    state, cross entropy over chunks of tokens.
    """
    from transformers import AutoModelForCausalLM

    rows, length = (8, 2048) if not options.tiny else (2, 64)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled and not options.tiny:
        forward = torch.compile(type(model.model.layers[0]).forward)
        for layer in model.model.layers:
            layer.forward = types.MethodType(forward, layer)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ model.lm_head.weight.T).float(), labels, reduction="sum")

    def step() -> None:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        parts = zip(hidden.split(2048), labels.split(2048), strict=True)
        loss = sum(checkpoint(chunk_loss, h, y, use_reentrant=False) for h, y in parts) / len(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    free_memory(device)
    duration = seconds(step, device, warmup=3, repeats=3 if options.tiny else 5)
    parameters = parameter_count(model.config)
    return {"tokens_per_s": rows * length / duration, "parameters": parameters, "peak_gib": peak_gib(device)}


def long_tail_lengths(total: int, longest: int, seed: int) -> list[int]:
    """Response lengths of a log-normal distribution with a heavy tail, together
    about `total` tokens with their prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = math.exp(7.0 + 0.9 * torch.randn((), generator=generator).item())
        lengths.append(int(min(max(drawn, 32), longest)))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length > 8]


def long_tail_samples(total: int, longest: int, vocab: int, seed: int = 0) -> list[Sample]:
    lengths = long_tail_lengths(total, longest, seed)
    return [one_sample(index, length, vocab) for index, length in enumerate(lengths)]


def one_sample(index: int, length: int, vocab: int) -> Sample:
    prompt = min(128, length // 4)
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
    sample = Sample(group_index=index // 8, index=index, tokens=tokens, response_length=length - prompt)
    sample.reward, sample.status = float(index % 3), Sample.Status.COMPLETED
    return sample


def our_step(
    shape: str, device: torch.device, options: argparse.Namespace, trainer: str = "fsdp", *, fp8: bool = False
) -> list[Record]:
    budget, total = TOKENS[shape]
    budget = options.micro_batch_tokens or budget
    while True:
        try:
            return _our_step(shape, device, options, budget, total, trainer, fp8)
        except torch.OutOfMemoryError:
            if budget <= 4096 or shape == "long":
                raise
        print(f"  {budget} tokens do not fit; trying {budget // 2}", flush=True)
        budget //= 2
        free_memory(device)


def _our_step(
    shape: str, device: torch.device, options: Any, budget: int, total: int, trainer: str, fp8: bool
) -> list[Record]:
    config = config_of(shape)
    model = ModelShape.from_hf_config(config)
    create_backend = importlib.import_module(f"slime.backends.{trainer}").create_backend
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        args = default_args(
            hf_checkpoint=folder,
            dtype="bfloat16",
            lr=1e-6,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=budget,
            balance_data=True,
            activation_checkpointing=options.checkpointing,
            fp8_training=fp8,
            compile=False if options.no_compile or options.tiny else None,
        )
        backend = create_backend(args, rank=0, world_size=1, device=device, random_weights=True)
    if shape == "long":
        samples = [one_sample(0, total, config.vocab_size)]
    else:
        samples = long_tail_samples(total, min(budget, 8192), config.vocab_size)
    batch = samples_to_batch(args, samples)
    data = split_for_ranks(args, batch, 1)[0]
    records = []

    def train_once(settings: Any) -> None:
        TrainingStep(backend, settings, 0, data).run()

    free_memory(device)
    kinds = {"on-policy step": {}, "with an old-policy pass": {"use_rollout_entropy": True}}
    for name, changes in list(kinds.items())[: 1 if options.only_on_policy else 2]:
        chosen = args.replace(**changes)
        step = functools.partial(train_once, chosen)
        started = time.perf_counter()
        step()
        synchronize(device)
        first = time.perf_counter() - started
        duration = seconds(step, device, warmup=1, repeats=options.steps)
        records.append(
            {
                "what": f"fp8: {name}" if fp8 else name if trainer == "fsdp" else f"{trainer}: {name}",
                "tokens_per_s": total / duration,
                "seconds": duration,
                "first_step_s": first,
                "parameters": parameter_count(config),
                "micro_batch_tokens": budget,
                "micro_batches": len(data.steps[0].micro_batches),
                "samples": len(samples),
                "longest": max(len(sample.tokens) for sample in samples),
                "response_share": sum(sample.response_length for sample in samples) / total,
                "flops_with_attention": 3
                * sum(document_flops(model, len(sample.tokens)) for sample in samples),
                "padding": 0.0,
                "peak_gib": peak_gib(device),
            }
        )
    if options.profile:
        records[0]["profile"] = profile_step(functools.partial(train_once, args), device)
    return records


def model_part(name: str, options: argparse.Namespace, device: torch.device, rate: float) -> list[Record]:
    shape = name if not options.tiny else "tiny-moe" if name in MIXTURES else "tiny"
    records: list[Record] = []
    references = {
        "naive transformers": dict(compiled=False, recompute=True),
        "plain compiled layers": dict(compiled=True, recompute=False),
    }
    if name in MIXTURES:  # its own grouped experts, nothing computed twice
        references = {"plain transformers": dict(compiled=False, recompute=False)}
    # Ours first: it is what a short run must not lose.
    attempts: list[tuple[str, Callable[[], list[Record]]]] = [
        ("ours", lambda: our_step(shape, device, options))
    ]
    if options.fp8:
        attempts.append(("fp8", lambda: our_step(shape, device, options, fp8=True)))
    if options.backend == "megatron":
        attempts.append(("megatron", lambda: our_step(shape, device, options, "megatron")))
    if not options.no_references and name != "long":  # rows of 2,048 tokens say nothing of it
        for what, settings in references.items():
            attempts.append(
                (
                    what,
                    lambda what=what, s=settings: [
                        {"what": what, **plain_step(shape, device, options=options, **s)}
                    ],
                )
            )
    for what, attempt in attempts:
        try:
            records += attempt()
        except Exception:
            records.append({"what": what, "error": traceback.format_exc(limit=-6)})
        torch._dynamo.reset()
        free_memory(device)
    for record in records:
        if "tokens_per_s" in record:
            record["mfu"] = record["tokens_per_s"] * 6 * record["parameters"] / rate
            if "flops_with_attention" in record:
                record["mfu_with_attention"] = record["flops_with_attention"] / record["seconds"] / rate
    return records


# -- balance -------------------------------------------------------------------------------------------------


def document_flops(shape: ModelShape, length: int) -> float:
    return pass_flops(shape, Stream(length, length * length, length))


def balance_part(options: argparse.Namespace) -> list[Record]:
    """Imbalance of estimated operations over eight ranks with 32
    long-tail samples each; no device is used.
    """
    shape = ModelShape.from_hf_config(config_of("4b"))
    cost = functools.partial(document_flops, shape)
    args = default_args(
        hf_checkpoint="unused",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        balance_data=True,
        balance_by_flops=True,
    )
    totals, in_step, allowed = [], [], 0
    for seed in range(3 if options.tiny else 20):
        lengths = draw_lengths(256, 16384, seed)
        (step,) = plan_steps(args, lengths, list(range(256)), dp_size=8)
        work = [[sum(cost(lengths[p]) for p in mb) for mb in rank] for rank in step.ranks]
        mean = sum(map(sum, work)) / 8
        if max(map(cost, lengths)) > 1.05 * mean:
            continue  # one sample is more than a rank's share: no schedule can help
        allowed += 1
        totals.append(max(map(sum, work)) / mean)
        in_step.append(sum(max(column) for column in zip(*work, strict=True)) / mean)
    return [
        {
            "batches": allowed,
            "imbalance_mean": statistics.mean(totals),
            "imbalance_worst": max(totals),
            "micro_batch_by_micro_batch_mean": statistics.mean(in_step),
        }
    ]


def draw_lengths(count: int, longest: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(7.0 + 0.9 * torch.randn(count, generator=generator))
    return drawn.clamp(32, longest).long().tolist()


# -- report --------------------------------------------------------------------------------------------------


def show(title: str, records: list[Record]) -> None:
    print(f"\n== {title}")
    for record in records:
        if "error" in record:
            print(f"  {record.get('what', title)}: FAILED\n{record['error']}")
            continue
        for name, value in record.items():
            if isinstance(value, dict):
                for kind, spent in value.items():
                    print(f"      {kind:<96}{spent:10.1f} ms")
            else:
                shown = f"{value:,.4g}" if isinstance(value, float) else value
                print(f"  {name:<34}{shown:>16}" if not isinstance(value, str) else f"  {name:<34}{value}")
        print()


def summary(results: dict[str, list[Record]]) -> None:
    print("\n| step | tokens/s | MFU (6N) | with attention | x plain | x compiled | x FSDP | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for part in MODELS:
        rows = {record["what"]: record for record in results.get(part, []) if "tokens_per_s" in record}
        for name, row in rows.items():
            against = [
                f"{row['tokens_per_s'] / rows[other]['tokens_per_s']:.2f}" if other in rows else "-"
                for other in (
                    "plain transformers" if part in MIXTURES else "naive transformers",
                    "plain compiled layers",
                    name.partition(": ")[2],
                )
            ]
            attention = f"{100 * row['mfu_with_attention']:.1f}%" if "mfu_with_attention" in row else "-"
            print(
                f"| {part}, {name} | {row['tokens_per_s']:,.0f} | {100 * row['mfu']:.1f}% | {attention} | "
                f"{' | '.join(against)} | {row['peak_gib']:.1f} |"
            )


def main() -> int:
    options = parse()
    as_a_trainer()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    started = time.perf_counter()
    rate = matrix_rate(device, 8192 if not options.tiny else 256)
    print(f"bf16 matrix rate: {rate / 1e12:.1f} TFLOP/s (torch {torch.__version__}, {device})", flush=True)
    parts: dict[str, Callable[[], list[Record]]] = {
        "balance": lambda: balance_part(options),
        "kernels": lambda: kernel_part(options, device),
        "experts": lambda: experts_part(options, device),
        **{name: functools.partial(model_part, name, options, device, rate) for name in MODELS},
    }
    results: dict[str, list[Record]] = {}
    for name, measure in parts.items():
        if options.part and name not in options.part:
            continue
        begun = time.perf_counter()
        try:
            results[name] = measure()
        except Exception:
            results[name] = [{"error": traceback.format_exc(limit=-6)}]
        show(f"{name} ({time.perf_counter() - begun:.0f} s)", results[name])
        sys.stdout.flush()
        free_memory(device)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"matrix_rate": rate, "results": results}, indent=2))
    summary(results)
    print(f"\n{time.perf_counter() - started:.0f} s; results in {options.json}")
    dist.destroy_process_group()
    return int(any("error" in record for records in results.values() for record in records))


if __name__ == "__main__":
    sys.exit(main())
