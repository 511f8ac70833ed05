"""What do Adam's moments in host memory, or in fewer bits, save of a GPU's memory, and cost of a step's time?

Random weights of Qwen3 shapes on the FSDP trainer, one GPU, no compiled layers. One model per shape; only the
optimizer changes: moments on the device (torch's fused AdamW, the reference), in host memory without and with
overlapped transfers, and both with bf16 and fp8 moments. First the steps are compared bit by bit with the
reference. For each: peak memory of a whole training step, what is held between two, and seconds of the step
and of the optimizer alone.

    python benchmarks/optimizer_memory.py [--part equality --part 0.6b --part 4b]
    python benchmarks/optimizer_memory.py --device cpu --tiny        (does the script work?)
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import free_memory, peak_gib, present_device, seconds, synchronize
from shapes import qwen3_config
from torch import nn
from train_step import long_tail_samples

from slime.arguments import Args, default_args
from slime.backends.fsdp import create_backend
from slime.backends.fsdp.backend import build_optimizer
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

Record = dict[str, Any]
PARTS = ("equality", "0.6b", "4b")
TOKENS = {"0.6b": (16384, 32768), "4b": (8192, 16384), "tiny": (256, 512)}  # of a micro-batch, of a step
HOST: Record = dict(optimizer_cpu_offload=True)
OVERLAP: Record = HOST | dict(overlap_cpu_optimizer_d2h_h2d=True)


def moments_in(name: str) -> Record:
    return dict(exp_avg_dtype=name, exp_avg_sq_dtype=name)


WAYS: dict[str, Record] = {
    "on the device": {},
    "in host memory": HOST,
    "in host memory, overlapped": OVERLAP,
    "half in host memory, overlapped": OVERLAP | dict(optimizer_offload_fraction=0.5),
    "bf16, on the device": moments_in("bf16"),
    "bf16, in host memory, overlapped": OVERLAP | moments_in("bf16"),
    "fp8, in host memory, overlapped": OVERLAP | moments_in("fp8"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="again for more; default: all")
    parser.add_argument(
        "--device", type=present_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes: checks the script")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/optimizer_memory.json"))
    return parser.parse_args()


def equality_part(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Five steps with the same gradients: are all weights those of torch's AdamW, bit by bit?"""
    sizes = [(300, 70), (7,), (64, 2048)] if options.tiny else [(8192, 4096), (4096,), (5000, 1003), (31,)]
    records = []
    for overlap in (False, True):
        for share in (0.5, 1.0):
            plan = MomentPlan(host_share=share, overlap=overlap)
            reference, ours = (_drawn(sizes, device) for _ in range(2))
            optimizers = [
                torch.optim.AdamW(reference, lr=1e-3, weight_decay=0.1, fused=True),
                PlacedAdamW([{"params": ours, "weight_decay": 0.1}], plan, lr=1e-3, staged=True),
            ]
            for step in range(5):
                for parameters, optimizer in zip((reference, ours), optimizers, strict=True):
                    generator = torch.Generator(device).manual_seed(step)
                    for parameter in parameters:
                        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
                    optimizer.step()
            same = all(torch.equal(a, b) for a, b in zip(reference, ours, strict=True))
            records.append({"what": f"overlap {overlap}, share {share}", "same bits": str(same)})
            if not same:
                records[-1]["error"] = "the weights differ"
    return records


def _drawn(sizes: list[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return [nn.Parameter(torch.randn(size, device=device, generator=generator)) for size in sizes]


def model_part(name: str, options: argparse.Namespace, device: torch.device) -> list[Record]:
    shape = "tiny" if options.tiny else name
    config, (budget, total) = qwen3_config(shape), TOKENS[shape]
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        args = default_args(
            hf_checkpoint=folder,
            dtype="bfloat16",
            lr=1e-6,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=budget,
            activation_checkpointing="full",
            compile=False,
        )
        backend = create_backend(args, rank=0, world_size=1, device=device, random_weights=True)
    samples = long_tail_samples(total, min(budget, 4096), config.vocab_size)
    data = split_for_ranks(args, samples_to_batch(args, samples), 1)[0]

    def step() -> None:
        TrainingStep(backend, args, 0, data).run()

    step()  # choices of kernels, the first allocations
    records = []
    for what, changes in WAYS.items():
        try:
            records.append(
                {"what": what, **_measure(backend, args.replace(**changes), step, options, device)}
            )
        except Exception:
            records.append({"what": what, "error": traceback.format_exc(limit=-6)})
        print(f"  {name}: {records[-1]}", flush=True)
    return records


def _measure(
    backend: Any, args: Args, step: Callable[[], None], options: argparse.Namespace, device: torch.device
) -> Record:
    parameters = list(backend.model.lm.parameters())
    backend.optimizer = build_optimizer(args, backend.model.lm.parameters())
    free_memory(device)
    begun = time.perf_counter()
    step()  # creates the moments, and locks their pages
    synchronize(device)
    first = time.perf_counter() - begun
    free_memory(device)
    held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    duration = seconds(step, device, warmup=0, repeats=options.steps)
    peak = peak_gib(device)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    alone = seconds(backend.optimizer.step, device, warmup=1, repeats=options.steps)
    backend.optimizer.zero_grad(set_to_none=True)
    moments = sum(
        value.nbytes
        for state in backend.optimizer.state.values()
        for value in state.values()
        if value.device.type == "cpu"
    )
    return {
        "parameters": sum(p.numel() for p in parameters),
        "peak_gib": peak,
        "held_gib": held,
        "host_gib": moments / 2**30,
        "step_s": duration,
        "optimizer_s": alone,
        "each_way_gb_per_s": moments / alone / 1e9,
        "first_step_s": first,
    }


def summary(results: dict[str, list[Record]]) -> None:
    print("\n| model | moments | peak GiB | held GiB | host GiB | step s | optimizer s | GB/s each way |")
    print("|---|---|---|---|---|---|---|---|")
    for part, records in results.items():
        for row in records:
            if "step_s" in row:
                print(
                    f"| {part} | {row['what']} | {row['peak_gib']:.1f} | {row['held_gib']:.1f} | "
                    f"{row['host_gib']:.1f} | {row['step_s']:.3f} | {row['optimizer_s']:.3f} | "
                    f"{row['each_way_gb_per_s']:.1f} |"
                )
            else:
                print(f"| {part} | {row['what']}: {row.get('error') or row['same bits']} | | | | | | |")


def main() -> int:
    options = parse()
    logging.basicConfig(level=logging.ERROR)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        results: dict[str, list[Record]] = {}
        for name in options.part or PARTS:
            begun = time.perf_counter()
            try:
                if name == "equality":
                    results[name] = equality_part(options, device)
                else:
                    results[name] = model_part(name, options, device)
            except Exception:
                results[name] = [{"what": name, "error": traceback.format_exc(limit=-6)}]
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
            free_memory(device)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=2))
        summary(results)
        dist.destroy_process_group()
    return int(any("error" in record for records in results.values() for record in records))


if __name__ == "__main__":
    sys.exit(main())
