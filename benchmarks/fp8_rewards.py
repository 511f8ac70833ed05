"""Does a policy learn as well from answers of an FP8 engine? Reward curves, several seeds each.

The RL run of a quick start, from its warmed-up model: as it is, with engines in FP8 whose tokens are weighted
by the ratio of the trainer's policy to theirs (--use-tis), and, where asked for, in FP8 without weights.
Told: the difference of log-probs of engine and trainer, the mean weight, and how far reward curves and
held-out scores lie apart in units of the spread between seeds.

    slime quickstart --seed 1
    python benchmarks/fp8_rewards.py --quickstart runs/quickstart --seeds 1 2 3

The embedded engine computes in the trainer's precision with weights that went through FP8 blocks; engines on
a GPU compute in FP8 as well. Runs that the results hold already are not made again. Flags it does not know go
to all runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from curves import compare, mean_curve

FP8 = ["--rollout-quantization", "fp8"]
CASES = {"plain": [], "fp8": [*FP8, "--use-tis"], "fp8-unweighted": [*FP8, "--no-use-tis"]}
REWARD = "rollout/raw_reward"
MEANS = {  # of all steps
    "|log-prob difference|": "train/train_rollout_logprob_abs_diff",
    "of fresh tokens": "train/logprob_abs_diff/lag_0",
    "weight": "train/tis_weight",
    "clipped share": "train/tis_clipfrac",
    "effective sample size": "train/ess",
}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quickstart", type=Path, required=True, help="folder of a finished quick start")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=["plain", "fp8"])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/fp8_rewards.json"))
    return parser.parse_known_args()


def run(options: argparse.Namespace, extra: list[str], case: str, seed: int) -> list[dict[str, Any]]:
    """The metrics of one run, in the order that they were logged."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", options.quickstart / "run.yaml", "--seed", seed, "--rollout-seed", seed]
        words += ["--run-dir", f"{folder}/run", "--load", f"{folder}/saved", "--save", f"{folder}/saved"]
        words += [
            "--save-hf",
            folder + "/hf-{rollout_id}",
            "--logprob-diff-threshold",
            0,
            *CASES[case],
            *extra,
        ]
        done = subprocess.run([sys.executable, "-m", "slime", "train", *map(str, words)], check=False)
        if done.returncode:
            sys.exit(f"the run {case} of seed {seed} ended with status {done.returncode}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    def curve(name: str) -> list[float]:
        # Each step once: what a rollout told is told again with its training.
        return [*{record["step"]: record[name] for record in records if name in record}.values()]

    scores = sorted({name for record in records for name in record if _is_score(name)})
    return {
        "rewards": curve(REWARD),
        "held_out": {name: curve(name) for name in scores},
        "means": {
            title: statistics.fmean(values) for title, name in MEANS.items() if (values := curve(name))
        },
    }


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1 and "-" not in name and name != "eval/step"


def report(runs: dict[str, dict[str, Any]], seeds: list[int], cases: list[str]) -> dict[str, Any]:
    """Print the curves, and return how each case compares with the plain one."""
    of = {case: [runs[f"{case}-{seed}"] for seed in seeds] for case in cases}
    for case, made in of.items():
        means = {
            title: statistics.fmean(r["means"][title] for r in made)
            for title in MEANS
            if all(title in r["means"] for r in made)
        }
        print(case, " ".join(f"{title} {value:.3g}" for title, value in means.items()))
    names = ["rewards", *of[cases[0]][0]["held_out"]]
    found: dict[str, Any] = {}
    for name in names:
        by_case = {c: [r[name] if name == "rewards" else r["held_out"][name] for r in of[c]] for c in cases}
        for case, curves in by_case.items():
            every = max(1, len(curves[0]) // 10)
            shown = " ".join(f"{value:.3f}" for value in mean_curve(curves)[::every])
            print(f"{name}, {case}, every {every} of {len(curves[0])}: {shown}")
        for case in cases:
            if case != "plain" and "plain" in cases and len(seeds) > 1:
                result = compare(by_case["plain"], by_case[case])
                found[f"{name}, {case}"] = result.as_json()
                print(f"{name}, {case} against plain: {result}")
    return found


def main() -> int:
    options, extra = parse()
    result: dict[str, Any] = {"flags": extra, "runs": {}}
    if options.json.is_file():
        earlier = json.loads(options.json.read_text())
        result = earlier if earlier["flags"] == extra else result
    for seed in options.seeds:
        for case in options.cases:
            name = f"{case}-{seed}"
            if name not in result["runs"]:
                result["runs"][name] = summary(run(options, extra, case, seed))
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    result["comparison"] = report(result["runs"], options.seeds, options.cases)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
