"""How much faster is the fully asynchronous run than the synchronous one, on the same devices?

    slime quickstart --run-dir runs/quickstart  # start model, prompts, held-out questions
    python benchmarks/async_speedup.py --quickstart runs/quickstart [--seeds 0 1 2] [--steps 60]

The task of the tiny quick start, one engine and one trainer rank on the CPU, the same number of steps and
samples, from the same weights. Two loads:

long-tail  an answer takes as long as one of a large model (0.6 s in the median, log-normal with sigma 1, at
           most 16 times the median), and so does its reward, a grader service that somebody waits for
even       answers and rewards take the time that they take here, about the same for all, and everything has
           to share one core: nothing to wait for and nothing that could be done meanwhile

The times of the first load are slept, as a host sleeps while a device or a judge works: which loop waits for
the slowest of a batch, and which does not, is what is measured; such runs may be made side by side
(`--at-once 3`) and on a busy machine. Goals under the long tail, over the seeds:

- the same steps and samples in at most half the time;
- the same accuracy: the mean of the last held-out evaluations is not lower by more than 2 points;
- held-out accuracy reaches `--target` for the first time after at most half the time.

Under the even load asynchrony has nothing to hide and trains on older tokens; CPU seconds are compared too,
which a busy machine changes less than the clock on the wall.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.cli.quickstart.rewards import exact_match
from slime.rollout.prompt_groups import attempt_of

GOAL = 2.0
SAME_ACCURACY = 0.02  # of the means over seeds
HELD_OUT = "heldout_greedy"  # 512 questions, answered without chance
LOADS: dict[str, dict[str, float]] = {
    "long-tail": {"answer_s": 0.6, "reward_s": 0.6, "sigma": 1.0, "longest": 16.0},
    "even": {"answer_s": 0.0, "reward_s": 0.0, "sigma": 0.0, "longest": 1.0, "cores": 1},
}
LOAD_VARIABLE = "SLIME_BENCHMARK_LOAD"
LEFT_OUT = ("run-dir", "load", "save", "save-hf", "save-interval")
LEFT_OUT += ("over-sampling-batch-size", "dynamic-sampling-filter-path")


def drawn_s(median_s: float, sample: Any, what: str) -> float:
    """The same for a sample whichever loop asks; an answer that is made anew has a length of its own."""
    load = json.loads(os.environ[LOAD_VARIABLE])
    draw = random.Random(f"{load['seed']}-{what}-{sample.index}-{attempt_of(sample)}")
    return median_s * min(load["longest"], draw.lognormvariate(0.0, load["sigma"])) if median_s else 0.0


async def take_the_time(args: Any, sample: Any, evaluation: bool = False) -> None:
    """--rollout-sample-hook-path: an answer is there when one of its length would be."""
    if not evaluation:
        load = json.loads(os.environ[LOAD_VARIABLE])
        sample.metadata["reward_s"] = drawn_s(load["reward_s"], sample, "reward")
        await asyncio.sleep(drawn_s(load["answer_s"], sample, "answer"))


async def slow_match(args: Any, sample: Any, **kwargs: Any) -> float:
    """--custom-rm-path: the reward of the quick start, after a while."""
    await asyncio.sleep(sample.metadata.get("reward_s", 0.0))
    return await exact_match(args, sample)


def expected_wait_s(load: dict[str, float], samples: int, prompts: int) -> dict[str, float]:
    """What the load alone comes to: the slowest sample of a batch, of a group, and the mean one."""
    draw = random.Random(0)

    def one() -> float:
        times = (
            load[name] * min(load["longest"], draw.lognormvariate(0, load["sigma"]))
            for name in ("answer_s", "reward_s")
        )
        return math.fsum(times)

    def slowest(count: int) -> float:
        return statistics.fmean(max(one() for _ in range(count)) for _ in range(300))

    return {"batch": slowest(samples * prompts), "group": slowest(samples), "sample": slowest(1)}


def settings_of(options: argparse.Namespace, folder: Path, mode: str, seed: int) -> dict[str, Any]:
    given = yaml.safe_load((options.quickstart / "run.yaml").read_text())
    own = {name: value for name, value in given.items() if name not in LEFT_OUT}
    own |= {
        "run-dir": str(folder),
        "seed": seed,
        "rollout-seed": seed,
        "num-rollout": options.steps,
        "rollout-batch-size": options.prompts,
        "n-samples-per-prompt": options.samples,
        "eval-interval": options.eval_interval,
        "eval-config": str(folder.parent / "eval.yaml"),
        "skip-eval-before-train": True,
        "lr": options.lr,
        "lr-warmup-iters": min(5, options.steps // 2),
        "min-lr": options.lr / 10,
        "custom-rm-path": f"{__file__}:slow_match",
        "rollout-sample-hook-path": [f"{__file__}:take_the_time"],
        "trainer-threads": 1,
        "engine-threads": 1,
        "sglang-server-concurrency": 4096,
    }
    if mode == "async":
        own |= {
            "rollout-function-path": FULLY_ASYNC_ROLLOUT_FUNCTION,
            "max-weight-staleness": options.staleness,
        }
    return own


def run_one(options: argparse.Namespace, load: str, mode: str, seed: int) -> dict[str, Any]:
    """One run to its end, in processes of its own."""
    folder = options.folder / f"{load}-{mode}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    held_out = yaml.safe_load((options.quickstart / "data" / "eval.yaml").read_text())
    sets = held_out["eval"]["datasets"]
    held_out["eval"]["datasets"] = [one for one in sets if one["name"] == HELD_OUT]
    (folder / "eval.yaml").write_text(yaml.safe_dump(held_out))
    spent = train(
        folder,
        "train" if mode == "sync" else "train-async",
        settings_of(options, folder / "run", mode, seed),
        {LOAD_VARIABLE: json.dumps({**LOADS[load], "seed": seed})},
        cores=int(LOADS[load].get("cores", 0)),
    )
    return {"load": load, "mode": mode, "seed": seed, "cpu_s": spent} | read(folder, options.target)


def train(
    folder: Path, command: str, settings: dict[str, Any], environment: dict[str, str], *, cores: int = 0
) -> float:
    """`slime train` with these settings; what it says is in log.txt. CPU seconds of all its processes.

    An earlier run in its `run-dir` is removed. `cores`: on how many of them it has to live; 0: on all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(settings["run-dir"], ignore_errors=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    words = [sys.executable, "-m", "slime", command, "--config", str(folder / "config.yaml"), "--quiet"]
    all_cores = os.sched_getaffinity(0)
    if cores:  # of this thread: what it starts is born with it
        os.sched_setaffinity(0, set(sorted(all_cores)[:cores]))
    try:
        with (folder / "log.txt").open("w") as log:
            started = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
            _, status, used = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
    finally:
        os.sched_setaffinity(0, all_cores)
    if started.returncode:
        told = (folder / "log.txt").read_text()[-2000:]
        raise SystemExit(f"{folder}: ended with {started.returncode}: {told}")
    return used.ru_utime + used.ru_stime


def read(folder: Path, target: float) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time" in row]
    began = steps[0]["time"] - steps[0]["perf/step_time"]
    curve = [
        {
            "step": row["eval/step"],
            "s": round(row["time"] - began, 3),
            "accuracy": row[f"eval/{HELD_OUT}"],
        }
        for row in rows
        if f"eval/{HELD_OUT}" in row
    ]
    ages = [row["rollout/staleness/mean"] for row in rows if "rollout/staleness/mean" in row]
    oldest = [row["rollout/staleness/max"] for row in rows if "rollout/staleness/max" in row]
    stale = [row["rollout/waste/stale/samples"] for row in rows if "rollout/waste/stale/samples" in row]
    return {
        "loop_s": steps[-1]["time"] - began,
        "step_s": statistics.median(row["perf/step_time"] for row in steps[1:] or steps),
        "train_s": statistics.median(row["perf/train_time"] for row in rows if "perf/train_time" in row),
        "accuracy": curve[-1]["accuracy"] if curve else math.nan,
        "target_s": next((point["s"] for point in curve if point["accuracy"] >= target), None),
        "curve": curve,
        "staleness_mean": statistics.fmean(ages),
        "staleness_max": max(oldest),
        "stale_samples": sum(stale),
    }


def summarise(options: argparse.Namespace, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for load in options.loads:
        known = {(run["mode"], run["seed"]): run for run in runs if run["load"] == load}
        pairs = [(known["sync", seed], known["async", seed]) for seed in options.seeds]
        row: dict[str, Any] = {
            "load": load,
            "waits": expected_wait_s(LOADS[load], options.samples, options.prompts),
        }
        for name in ("loop_s", "target_s", "cpu_s"):
            row[f"{name}_ratios"] = [_ratio(sync[name], pool[name]) for sync, pool in pairs]
        for number, mode in enumerate(("sync", "async")):
            scores = [pair[number]["accuracy"] for pair in pairs]
            row[f"accuracy_{mode}"] = statistics.fmean(scores)
            row[f"accuracy_{mode}_spread"] = max(scores) - min(scores)
        same = row["accuracy_async"] >= row["accuracy_sync"] - SAME_ACCURACY
        faster = min(row["loop_s_ratios"]) >= GOAL and min(row["target_s_ratios"]) >= GOAL
        row["met"] = load != "long-tail" or (same and faster)
        found.append(row)
    return found


def _ratio(sync: float | None, pool: float | None) -> float:
    """0: one of them did not get there."""
    return sync / pool if sync is not None and pool is not None else 0.0


def told_summary(row: dict[str, Any], target: float) -> str:
    def ratio(name: str) -> str:
        values = row[name]
        return f"{statistics.median(values):.2f}x ({min(values):.2f} to {max(values):.2f})"

    return (
        f"{row['load']}: async against sync: {ratio('loop_s_ratios')} in time for all steps, "
        f"{ratio('target_s_ratios')} until {target:.0%} of the held-out questions, "
        f"{ratio('cpu_s_ratios')} in CPU seconds; accuracy {row['accuracy_sync']:.3f} sync, "
        f"{row['accuracy_async']:.3f} async; the slowest of a batch takes {row['waits']['batch']:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quickstart", type=Path, required=True, metavar="FOLDER", help="of a finished `slime quickstart`")
    add("--folder", type=Path, default=Path("runs/async_speedup"), help="where runs are kept")
    add("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=60)
    add("--eval-interval", type=int, default=10)
    add("--target", type=float, default=0.9, help="held-out accuracy that both are to reach")
    add("--prompts", type=int, default=16, help="of a step")
    add("--samples", type=int, default=8, help="of a prompt")
    add("--lr", type=float, default=3e-4, help="half of the quick start's: large for old tokens")
    add("--staleness", type=int, default=2, help="--max-weight-staleness of the asynchronous runs")
    add("--at-once", type=int, default=1, help="runs side by side; only where waiting is all that they do")
    add("--json", type=Path, default=Path("benchmarks/results/async_speedup.json"))
    options = parser.parse_args()
    if not (options.quickstart / "run.yaml").is_file():
        parser.error(f"--quickstart {options.quickstart} has no run.yaml: make it with `slime quickstart`")
    cases = list(itertools.product(options.loads, options.seeds, ("sync", "async")))
    before = os.getloadavg()[0]
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = list(pool.map(lambda case: _told(run_one(options, case[0], case[2], case[1])), cases))
    summary = summarise(options, runs)
    for row in summary:
        print(told_summary(row, options.target))
    shown = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    loads = {"before": before, "after": os.getloadavg()[0]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"settings": shown, "machine_load": loads, "summary": summary, "runs": runs}, indent=2)
        + "\n"
    )
    return 0 if all(row["met"] for row in summary) else 1


def _told(run: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{run['load']:9} {run['mode']:5} seed {run['seed']}: {run['loop_s']:.0f} s, {run['step_s']:.2f} s "
        f"a step, accuracy {run['accuracy']:.3f}, tokens {run['staleness_mean']:.2f} pushes old "
        f"(at most {run['staleness_max']:.0f})",
        flush=True,
    )
    return run


if __name__ == "__main__":
    raise SystemExit(main())
