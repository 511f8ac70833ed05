"""Does over-sampling with partial rollouts pay when a few answers are far longer than the rest?

Colocated GRPO runs on the same prompts. The length of each answer is drawn from a log-normal distribution
whose longest is 16 times the median, and forced. The plain run waits for the longest answer of each step; the
other fetches more prompts than it needs, takes the first groups that end, and continues the rest in the next
rollout. Held against each other: trained tokens per second over the steps behind the first ones, the lengths
of what is trained on, and the reward curves, by the spread between seeds:

- sampled: the answers of a training batch. Part of them were sampled by weights before, so this curve is
  behind by the mean age of tokens even where both policies are equally good.
- fresh (--eval-prompts): answers of median length to other prompts, by the weights after each step.

    python benchmarks/long_tail.py --shape tiny --seeds 1 2 3 --eval-prompts 32      # embedded engine
    python benchmarks/long_tail.py --shape 0.6b --engine sglang --sglang-python PATH  # one GPU

Runs that the results hold already, with the same settings, are not made again. Flags it does not know go to
all runs. Give SGLang CUDA graphs for all answers in flight, over-sampled ones too:
--sglang-cuda-graph-max-bs 512.
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
from curves import compare, mean_curve
from shapes import SHAPES

LONGEST = 16  # times the median
SIGMA = 1.0  # of the logarithm: about one answer of 400 is cut at the longest
GOAL = 1.5
MEDIAN = "SLIME_BENCHMARK_MEDIAN_TOKENS"  # tells it to the process of the rollout
SAMPLES = 8  # per prompt
KINDS = ("plain", "partial")
CURVES = {"sampled": "rollout/raw_reward", "fresh": "eval/fresh"}


def length_of(seed: int, index: int, median: int) -> int:
    drawn = median * math.exp(SIGMA * random.Random(f"{seed} {index}").gauss(0.0, 1.0))
    return max(1, min(LONGEST * median, round(drawn)))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """An answer of exactly the length that seed and index draw; of median length in an evaluation."""
    from slime.rollout.sglang_rollout import generate as usual  # late: the benchmark itself needs none of it

    median = int(os.environ[MEDIAN])
    length = median if evaluation else length_of(args.rollout_seed, sample.index, median)
    return await usual(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--median", type=int, help="tokens of an answer; default: 16 (tiny) or 256")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {SAMPLES} answers each")
    parser.add_argument("--over-sampling", type=float, default=2.0, help="prompts fetched / needed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=2, help="first steps, whose speed is not counted")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[42], help="of order, lengths, sampling and trainer"
    )
    parser.add_argument(
        "--eval-prompts", type=int, default=0, help=f"after each step, {SAMPLES} answers each"
    )
    parser.add_argument("--runs", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/long_tail.json"))
    options, extra = parser.parse_known_args()
    options.median = options.median or (16 if options.shape == "tiny" else 256)
    return options, extra


def run(
    options: argparse.Namespace, extra: list[str], kind: str, seed: int, folder: Path
) -> list[dict[str, float]]:
    """One run of colocated_grpo.py; its metrics by step."""
    found = folder / "steps.json"
    words = [
        *("--shape", options.shape, "--engine", options.engine, "--steps", options.steps),
        *("--prompts", options.prompts, "--output-tokens", LONGEST * options.median, "--json", found),
        *("--custom-generate-function-path", f"{Path(__file__).resolve()}:generate"),
        *("--run-dir", folder / "run", "--seed", seed, "--rollout-seed", seed, "--rollout-shuffle"),
    ]
    if kind == "partial":
        fetched = round(options.over_sampling * options.prompts)
        words += ["--over-sampling-batch-size", fetched, "--partial-rollout"]
    if options.eval_prompts:
        words += evaluation_flags(options, folder / "fresh.jsonl")
    command = [sys.executable, colocated_grpo.__file__, *map(str, words), *extra]
    done = subprocess.run(command, env={**os.environ, MEDIAN: str(options.median)}, check=False)
    if not found.is_file():
        sys.exit(f"the {kind} run ended with status {done.returncode} before it wrote its steps")
    steps: list[dict[str, float]] = json.loads(found.read_text())["steps"]
    return steps


def evaluation_flags(options: argparse.Namespace, path: Path) -> list[Any]:
    rng = random.Random("fresh")
    rows = [
        {"input": "".join(rng.choices(colocated_grpo.CHARACTERS, k=32)), "label": "0"}
        for _ in range(options.eval_prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--eval-prompt-data", "fresh", path, "--eval-interval", 1, "--skip-eval-before-train"]
    return [*words, "--n-samples-per-eval-prompt", SAMPLES]


def summary(steps: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    counted = [step for step in steps[options.skip :] if "perf/step_time" in step]
    tokens = [step["rollout/response_lengths"] * options.prompts * SAMPLES for step in counted]
    seconds = [seconds_of(step, evaluated=bool(options.eval_prompts)) for step in counted]
    return {
        "step_s": statistics.fmean(seconds),
        "rollout_s": statistics.fmean(step["perf/rollout_time"] for step in counted),
        "trained_tokens_per_s": sum(tokens) / sum(seconds),
        "tokens_per_step": statistics.fmean(tokens),
        "longest_answer": statistics.fmean(step["rollout/response_len/max"] for step in counted),
        "staleness": statistics.fmean(step["rollout/staleness/mean"] for step in counted),
        **{name: [step[key] for step in steps if key in step] for name, key in CURVES.items()},
    }


def seconds_of(step: dict[str, float], *, evaluated: bool) -> float:
    """Of a step; where an evaluation is made in each, of its parts without that."""
    parts = ("perf/rollout_time", "perf/train_time", "perf/update_weights_time")
    return sum(step[part] for part in parts) if evaluated else step["perf/step_time"]


def report(runs: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Print how partial rollouts compare with plain ones, and return it."""
    of = {kind: [runs[f"{kind}-{seed}"] for seed in options.seeds] for kind in KINDS}

    def mean(kind: str, name: str) -> float:
        return statistics.fmean(made[name] for made in of[kind])

    for kind in KINDS:
        numbers = ("step_s", "rollout_s", "tokens_per_step", "longest_answer", "staleness")
        print(kind, " ".join(f"{name} {mean(kind, name):.4g}" for name in numbers))
    for name in CURVES:
        for kind in KINDS:
            print(f"{name}, {kind}:", " ".join(f"{r:.3f}" for r in mean_curve([m[name] for m in of[kind]])))
    found: dict[str, Any] = {
        "speed": mean("partial", "trained_tokens_per_s") / mean("plain", "trained_tokens_per_s"),
        "tokens_per_step": mean("partial", "tokens_per_step") / mean("plain", "tokens_per_step"),
        "staleness": mean("partial", "staleness"),
    }
    if len(options.seeds) > 1:
        for name in CURVES:
            curves = {kind: [made[name] for made in of[kind]] for kind in KINDS}
            if all(curves["plain"]):
                found[name] = compare(curves["plain"], curves["partial"]).as_json()
                print(f"{name}: {compare(curves['plain'], curves['partial'])}")
    print(f"tokens a step, partial / plain: {found['tokens_per_step']:.3f} (1: no bias to short answers)")
    print(f"tokens are {found['staleness']:.2f} steps old on average")
    print(
        f"trained tokens/s with over-sampling and partial rollout / plain: {found['speed']:.2f} (goal {GOAL})"
    )
    return found


def main() -> int:
    options, extra = parse()
    told_apart = {k: str(v) for k, v in vars(options).items() if k not in ("json", "runs", "seeds")}
    result: dict[str, Any] = {"settings": told_apart, "flags": extra, "runs": {}}
    if options.json.is_file():
        earlier = json.loads(options.json.read_text())
        if (earlier.get("settings"), earlier.get("flags")) == (told_apart, extra):
            result = earlier
    for seed in options.seeds:
        for kind in options.runs:
            if f"{kind}-{seed}" in result["runs"]:
                continue
            with tempfile.TemporaryDirectory() as name:
                steps = run(options, extra, kind, seed, Path(name))
            result["runs"][f"{kind}-{seed}"] = {**summary(steps, options), "steps": steps}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not {f"{kind}-{seed}" for kind in KINDS for seed in options.seeds} <= result["runs"].keys():
        return 0
    result["comparison"] = report(result["runs"], options)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["comparison"]["speed"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
