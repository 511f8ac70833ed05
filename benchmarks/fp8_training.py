"""Does a model that multiplies in FP8 learn as one in 16 bits does?

The same random weights are trained twice on the same sequences, without and with `--fp8-training`: tokens of
a random chain, of which the model first learns the pairs (a quick fall) and then sharpens. Held against each
other: the loss of every step, and its mean over the last quarter of the steps.

    python benchmarks/fp8_training.py                                  # one GPU; goal: within 1%
    python benchmarks/fp8_training.py --shape small-moe                # a mixture of 32 experts
    python benchmarks/fp8_training.py --shape tiny --steps 20 --device cpu     (does the script work?)
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import free_memory, peak_gib, present_device, synchronize
from shapes import MIXTURES, SHAPES, config_of

from slime.arguments import default_args
from slime.backends.fsdp import create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample

VOCAB, SUCCESSORS = 512, 8
GOAL = 0.01


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b", choices=(*SHAPES, *MIXTURES))
    parser.add_argument(
        "--device", type=present_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=16, help="of one step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/fp8_training.json"))
    return parser.parse_args()


class Chain:
    """Sequences in which one of a few tokens follows each token, some of them more often."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._next = torch.randint(0, VOCAB, (VOCAB, SUCCESSORS), generator=self._generator)
        self._weights = torch.softmax(torch.randn(VOCAB, SUCCESSORS, generator=self._generator), dim=1)

    def draw(self, count: int, length: int) -> list[Sample]:
        tokens = torch.randint(0, VOCAB, (count, 1), generator=self._generator)
        for _ in range(length - 1):
            last = tokens[:, -1]
            chosen = torch.multinomial(self._weights[last], 1, generator=self._generator)
            tokens = torch.cat((tokens, self._next[last].gather(1, chosen)), dim=1)
        return [self._sample(index, row) for index, row in enumerate(tokens.tolist())]

    @staticmethod
    def _sample(index: int, tokens: list[int]) -> Sample:
        sample = Sample(group_index=index, index=index, tokens=tokens, response_length=len(tokens) - 1)
        sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
        return sample


def train(options: argparse.Namespace, device: torch.device, fp8: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config_of(options.shape, VOCAB).save_pretrained(folder)
        args = default_args(
            hf_checkpoint=folder,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            loss_type="sft_loss",
            lr=options.lr,
            lr_warmup_iters=min(10, options.steps // 2),
            calculate_per_token_loss=True,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=16384,
            fp8_training=fp8,
        )
        backend = create_backend(args, rank=0, world_size=1, device=device, random_weights=True)
        backend.expect_steps(options.steps)
    chain, losses = Chain(), []
    batches = [chain.draw(options.sequences, options.length) for _ in range(options.steps)]
    free_memory(device)
    started = time.perf_counter()
    for number, samples in enumerate(batches):
        if number == options.steps // 4:  # compiling is over
            synchronize(device)
            started = time.perf_counter()
        (data,) = split_for_ranks(args, samples_to_batch(args, samples), 1)
        losses.append(TrainingStep(backend, args, number, data).run().summary["train/loss"])
    synchronize(device)
    spent = (time.perf_counter() - started) / (options.steps - options.steps // 4)
    tokens = options.sequences * options.length
    return {"losses": losses, "tokens_per_s": tokens / spent, "peak_gib": peak_gib(device)}


def compare(plain: list[float], rounded: list[float]) -> dict[str, float]:
    """Relative differences of the loss: largest of a step, and of the mean over the last quarter."""
    last = len(plain) // 4
    ends = [statistics.fmean(losses[-last:]) for losses in (plain, rounded)]
    apart = [abs(b - a) / a for a, b in zip(plain, rounded, strict=True)]
    return {
        "end, 16 bit": ends[0],
        "end, fp8": ends[1],
        "end apart": abs(ends[1] - ends[0]) / ends[0],
        "mean apart": statistics.fmean(apart),
        "largest apart": max(apart),
    }


def main() -> int:
    options = parse()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    kind = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(kind, init_method=address, rank=0, world_size=1)
    found: dict[str, Any] = {}
    for name, fp8 in (("16 bit", False), ("fp8", True)):
        found[name] = train(options, device, fp8)
        shown = [f"{loss:.4f}" for loss in found[name]["losses"][:: max(1, options.steps // 10)]]
        print(f"{name}: {' '.join(shown)}; {found[name]['tokens_per_s']:,.0f} tokens/s", flush=True)
        torch._dynamo.reset()
    found["compared"] = compare(found["16 bit"]["losses"], found["fp8"]["losses"])
    speed = found["fp8"]["tokens_per_s"] / found["16 bit"]["tokens_per_s"]
    print({name: round(value, 5) for name, value in found["compared"].items()}, f"{speed:.2f} x tokens/s")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
    return 0 if found["compared"]["end apart"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
