"""Does `slime simulate` say beforehand how long the steps of a real run take?

    slime quickstart --run-dir runs/quickstart  # start model, prompts, held-out questions
    python benchmarks/simulation_check.py --quickstart runs/quickstart [--parts plain slow-rewards]

plain         the quick start itself: costs from its first ten steps, the steps after them predicted. For an
              idle machine, where a step takes the same time all along
slow-rewards  a grader that takes 3 s on average (log-normal, sigma 0.8, slept): costs of the host from the
              first ten steps of a synchronous run; predicted are that run's steps and those of a fully
              asynchronous one, which the simulation has seen nothing of. Waiting is most of it, so that a
              busy machine may run it

Goal: every mean step time within 15%.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.cli.quickstart.rewards import exact_match
from slime.simulation.workload import RewardModel

GOAL = 0.15
REWARD_S, SIGMA = 3.0, 0.8
STALENESS = 3
GRADER = RewardModel(REWARD_S, SIGMA)


async def slow_match(args: Any, sample: Any, **kwargs: Any) -> float:
    """--custom-rm-path: the same seconds for a sample as in the simulation."""
    await asyncio.sleep(GRADER.seconds(sample))
    return await exact_match(args, sample)


def real_run(options: argparse.Namespace, mode: str) -> Path:
    """The folder of a run that is made here."""
    # Here, since the processes of a run, which load the reward from this file, do not find its neighbours.
    from async_speedup import LEFT_OUT, train

    folder = options.folder / mode
    given = yaml.safe_load((options.quickstart / "run.yaml").read_text())
    settings = {name: value for name, value in given.items() if name not in (*LEFT_OUT, "eval-config")} | {
        "run-dir": str(folder / "run"),
        "num-rollout": options.steps,
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "custom-rm-path": f"{__file__}:slow_match",
        "trainer-threads": 1,
        "engine-threads": 1,
    }
    settings.pop("eval-interval", None)
    if mode == "fully-async":
        settings |= {
            "rollout-function-path": FULLY_ASYNC_ROLLOUT_FUNCTION,
            "max-weight-staleness": STALENESS,
        }
    train(folder, "train" if mode == "sync" else "train-async", settings, {})
    return folder


def step_times(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    busy = {row["eval/step"] + after for row in rows if "eval/step" in row for after in (0, 1)}
    return [
        row["perf/step_time"] for row in rows if "perf/step_time" in row and row["rollout/step"] not in busy
    ]


def simulated_step(config: Path, loop: str, costs: Path, steps: int, *more: str) -> float:
    command = [
        sys.executable,
        "-m",
        "slime",
        "simulate",
        str(config),
        "--loop",
        loop,
        "--measured",
        str(costs),
    ]
    command += ["--steps", str(steps), "--json", "--prompt-tokens", "6", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout)["splits"][0]["step_s"])


def check_plain(options: argparse.Namespace) -> list[dict[str, Any]]:
    real = statistics.median(step_times(options.quickstart / "rl")[11:])
    found = simulated_step(options.quickstart / "run.yaml", "sync", options.quickstart / "rl", 6)
    return [{"part": "plain", "loop": "sync", "real_s": real, "simulated_s": found}]


def check_slow_rewards(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    runs = {mode: real_run(options, mode) for mode in ("sync", "fully-async")}
    for mode, folder in runs.items():
        more = ("--reward-s", f"{REWARD_S}:{SIGMA}")
        costs = runs["sync"] / "run"
        found = simulated_step(folder / "config.yaml", mode, costs, options.steps, *more)
        real = statistics.fmean(step_times(folder / "run")[1:])  # the first one has nothing before it
        rows.append({"part": "slow-rewards", "loop": mode, "real_s": real, "simulated_s": found})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parts = {"plain": check_plain, "slow-rewards": check_slow_rewards}
    add("--quickstart", type=Path, required=True, metavar="FOLDER", help="of a finished `slime quickstart`")
    add("--folder", type=Path, default=Path("runs/simulation_check"), help="where runs are kept")
    add("--parts", nargs="+", choices=tuple(parts), default=list(parts))
    add("--steps", type=int, default=24, help="of the runs with slow rewards")
    add("--json", type=Path, default=Path("benchmarks/results/simulation_check.json"))
    options = parser.parse_args()
    if not (options.quickstart / "rl" / "metrics.jsonl").is_file():
        parser.error(
            f"--quickstart {options.quickstart} holds no finished run: make it with `slime quickstart`"
        )
    load = os.getloadavg()[0]
    rows = [row for part in options.parts for row in parts[part](options)]
    for row in rows:
        row["error"] = row["simulated_s"] / row["real_s"] - 1
        print(
            f"{row['part']:12} {row['loop']:11} a step: {row['real_s']:.3g} s real, "
            f"{row['simulated_s']:.3g} s "
            f"simulated, {row['error']:+.1%}"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"goal": GOAL, "machine_load": load, "rows": rows}, indent=2) + "\n")
    return 0 if all(abs(row["error"]) <= GOAL for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
