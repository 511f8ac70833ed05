"""Does over-sampling with partial rollouts pay when a few answers are far longer than the rest?

Two colocated GRPO runs on the same prompts. The length of each answer is drawn from a log-normal distribution
whose longest is 16 times the median, and forced. The plain run waits for the longest answer of each step; the
other fetches more prompts than it needs, takes the first groups that end, and continues the rest in the next
rollout. Held against each other: trained tokens per second over the steps behind the first ones, and the
rewards.

    python benchmarks/long_tail.py --shape tiny                                      # embedded engine
    python benchmarks/long_tail.py --shape 0.6b --engine sglang --sglang-python PATH  # one GPU

Flags it does not know go to both runs. Give SGLang CUDA graphs for all answers in flight, over-sampled ones
too: --sglang-cuda-graph-max-bs 512.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import colocated_grpo
from shapes import SHAPES

LONGEST = 16  # times the median
SIGMA = 1.0  # of the logarithm: about one answer of 400 is cut at the longest
GOAL = 1.5
MEDIAN = "SLIME_BENCHMARK_MEDIAN_TOKENS"  # tells it to the process of the rollout


def length_of(index: int, median: int) -> int:
    drawn = median * math.exp(SIGMA * random.Random(index).gauss(0.0, 1.0))
    return max(1, min(LONGEST * median, round(drawn)))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """An answer of exactly the length that its index draws."""
    from slime.rollout.sglang_rollout import generate as usual  # late: the benchmark itself needs none of it

    length = length_of(sample.index, int(os.environ[MEDIAN]))
    return await usual(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--median", type=int, help="tokens of an answer; default: 16 (tiny) or 256")
    parser.add_argument("--prompts", type=int, default=32, help="per step, 8 answers each")
    parser.add_argument("--over-sampling", type=float, default=2.0, help="prompts fetched / needed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=2, help="first steps, which are not counted")
    parser.add_argument("--runs", nargs="+", default=["plain", "partial"], choices=("plain", "partial"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/long_tail.json"))
    options, extra = parser.parse_known_args()
    options.median = options.median or (16 if options.shape == "tiny" else 256)
    return options, extra


def run(options: argparse.Namespace, extra: list[str], name: str, folder: Path) -> list[dict[str, float]]:
    """One run of colocated_grpo.py; its metrics by step."""
    found = folder / f"{name}.json"
    words = [
        *("--shape", options.shape, "--engine", options.engine, "--steps", options.steps),
        *("--prompts", options.prompts, "--output-tokens", LONGEST * options.median, "--json", found),
        *("--custom-generate-function-path", f"{Path(__file__).resolve()}:generate"),
        *("--run-dir", folder / name),
    ]
    if name == "partial":
        fetched = round(options.over_sampling * options.prompts)
        words += ["--over-sampling-batch-size", fetched, "--partial-rollout"]
    command = [sys.executable, colocated_grpo.__file__, *map(str, words), *extra]
    done = subprocess.run(command, env={**os.environ, MEDIAN: str(options.median)}, check=False)
    if not found.is_file():
        sys.exit(f"the {name} run ended with status {done.returncode} before it wrote its steps")
    steps: list[dict[str, float]] = json.loads(found.read_text())["steps"]
    return steps


def summary(steps: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    counted = [step for step in steps[options.skip :] if "perf/step_time" in step]
    samples = options.prompts * 8
    tokens = [step["rollout/response_lengths"] * samples for step in counted]
    return {
        "step_s": statistics.fmean(step["perf/step_time"] for step in counted),
        "rollout_s": statistics.fmean(step["perf/rollout_time"] for step in counted),
        "trained_tokens_per_s": sum(tokens) / sum(step["perf/step_time"] for step in counted),
        "tokens_per_step": statistics.fmean(tokens),
        "rewards": [step.get("rollout/raw_reward") for step in steps],
    }


def main() -> int:
    options, extra = parse()
    result: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}, "flags": extra}
    with tempfile.TemporaryDirectory() as name:
        for which in options.runs:
            steps = run(options, extra, which, Path(name))
            result[which] = {**summary(steps, options), "steps": steps}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    for which in options.runs:
        print(which, {k: v for k, v in result[which].items() if k != "steps"})
    if set(options.runs) < {"plain", "partial"}:
        return 0
    ratio = result["partial"]["trained_tokens_per_s"] / result["plain"]["trained_tokens_per_s"]
    print(f"trained tokens/s with over-sampling and partial rollouts / plain: {ratio:.2f} (goal {GOAL})")
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
