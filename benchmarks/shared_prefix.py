"""What does a training step gain when the samples of a prompt share its tokens?

One on-policy GRPO step of the FSDP trainer on random weights, with `--share-prefix` and without it in turn,
on the same samples: once where prompts are long and answers short, once where answers dominate and sharing
stays off by itself. With `--share-prefix` the budget of a micro-batch counts a prompt once. Tokens per second
count every sample's tokens, as if nothing were shared. The largest difference of a log-prob between both is
printed too.

    python benchmarks/shared_prefix.py --shape 0.6b                  # one GPU; goals: 3, and at least 0.98
    python benchmarks/shared_prefix.py --shape tiny --device cpu     (does the script work?)
"""

import argparse
import json
import logging
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernel_times import profile_step
from measuring import as_a_trainer, free_memory, peak_gib, present_device, seconds
from shapes import SHAPES, config_of

from slime.arguments import default_args
from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.liveness.stacks import watch_exit
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample

# Prompt and answer tokens of a sample: what repeats, and what does not.
CASES = {"long prompts": (2048, 256), "long answers": (128, 2048)}
TINY_CASES = {"long prompts": (96, 8), "long answers": (8, 64)}
GROUP = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b", choices=tuple(SHAPES))
    parser.add_argument(
        "--device", type=present_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--groups", type=int, default=8, help="prompts of a step, of 8 samples each")
    parser.add_argument("--max-tokens", type=int, default=40960, help="tokens of a micro-batch's samples")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--by-default", dest="share", action="store_const", const=None, default=True,
        help="share where that pays, in micro-batches as small as without; else as --share-prefix does",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="where the GPU's time goes in a shared step")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=tuple(CASES))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/shared_prefix.json"))
    return parser.parse_args()


def make_samples(groups: int, prompt: int, answer: int, vocab: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(groups):
        first = torch.randint(0, vocab, (prompt,), generator=generator).tolist()
        for _ in range(GROUP):
            rest = torch.randint(0, vocab, (answer,), generator=generator).tolist()
            sample = Sample(group_index=number, index=len(samples), tokens=first + rest)
            sample.response_length, sample.reward = answer, float(len(samples) % 3)
            sample.status = Sample.Status.COMPLETED
            samples.append(sample)
    return samples


class Side:
    """A step with the trainer set in one way, and what was measured of it."""

    def __init__(self, backend: Any, settings: Any, samples: list[Sample]):
        self._backend, self._settings = backend, settings
        (self._data,) = split_for_ranks(settings, samples_to_batch(settings, samples), 1)
        self.spent: list[float] = []
        self.peak_gib = 0.0

    def step(self) -> None:
        # The trainer reads its own settings, the step those that it is given.
        self._backend.args = self._settings
        TrainingStep(self._backend, self._settings, 0, self._data).run()

    def log_probs(self) -> torch.Tensor:
        """Of all answers, sample by sample."""
        self._backend.args = self._settings
        mbs = build_micro_batches(self._data.batch, self._data.micro_batches)
        found = self._backend.log_probs(mbs).log_probs
        by_index = dict(zip(self._data.batch["sample_indices"], found, strict=True))
        return torch.cat([by_index[i] for i in sorted(by_index)])


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    config = config_of(options.shape)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        args = default_args(
            hf_checkpoint=folder,
            dtype="float32" if options.shape == "tiny" else "bfloat16",
            lr=0.0,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=options.max_tokens,
        )
        backend = create_backend(args, rank=0, world_size=1, device=device, random_weights=True)
    found: dict[str, dict[str, Any]] = {}
    cases = TINY_CASES if options.shape == "tiny" else CASES
    for name, sizes in ((name, cases[name]) for name in options.cases):
        samples = make_samples(options.groups, *sizes, config.vocab_size)
        total = sum(len(sample.tokens) for sample in samples)
        sides: dict[str, Side] = {}
        for label, share in (("plain", False), ("shared", options.share)):
            sides[label] = Side(backend, args.replace(share_prefix=share), samples)
            free_memory(device)
            seconds(sides[label].step, device, warmup=1, repeats=1)
            sides[label].peak_gib = peak_gib(device)
        for _ in range(options.steps):  # in turns, so that a machine that slows down does so for both
            for side in sides.values():
                side.spent.append(seconds(side.step, device, warmup=0, repeats=1))
        rows: dict[str, Any] = {}
        for label, side in sides.items():
            spent = statistics.median(side.spent)
            rows[label] = {"tokens_per_s": total / spent, "seconds": side.spent, "peak_gib": side.peak_gib}
            if options.profile:
                rows[label]["profile"] = profile_step(side.step, device)
        log_probs = [side.log_probs() for side in sides.values()]
        rows["ratio"] = rows["shared"]["tokens_per_s"] / rows["plain"]["tokens_per_s"]
        rows["largest_difference"] = float((log_probs[0] - log_probs[1]).abs().max())
        rows["mean_difference"] = float((log_probs[0] - log_probs[1]).abs().mean())
        found[name] = rows
        print(name, json.dumps(rows, indent=1 if options.profile else None), flush=True)
    return found


def main() -> None:
    options = parse()
    as_a_trainer()
    logging.basicConfig(level=logging.ERROR)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
    )
    found = measure(options, device)
    print("\n| case | plain tokens/s | shared tokens/s | ratio | GiB plain / shared |\n|---|---|---|---|---|")
    for name, rows in found.items():
        plain, shared = rows["plain"], rows["shared"]
        rates = f"{plain['tokens_per_s']:,.0f} | {shared['tokens_per_s']:,.0f}"
        print(
            f"| {name} | {rates} | {rows['ratio']:.2f} | {plain['peak_gib']:.1f} / {shared['peak_gib']:.1f} |"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    watch_exit()
