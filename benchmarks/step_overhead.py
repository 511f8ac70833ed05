"""What share of a training step is neither the engine's forward passes nor
the trainer's forward and backward passes?

    python benchmarks/step_overhead.py --run-dir runs/quickstart/rl    # reads the run's metrics.jsonl

The first two steps are left out: they load code and fill caches.
"Optimizer" is listed apart; it counts as overhead.
"""

import argparse
import json
import statistics
from pathlib import Path

SKIPPED_STEPS = 2
PARTS = {
    "engine forward": "perf/engine_forward_time",
    "trainer forward and backward": "perf/actor_train_time",
    "optimizer": "perf/optimizer_time",
    "rollout beside the forward passes": "perf/rollout_time",
    "weight push": "perf/update_weights_time",
}


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """One record per rollout that was trained, with the seconds of each part."""
    steps: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.get("rollout/step", row.get("train/step"))
        if step is not None:
            steps.setdefault(step, {}).update(row)
    return [
        row
        for _, row in sorted(steps.items())
        if {"perf/engine_forward_time", "perf/actor_train_time"} <= row.keys()
    ]


def split(row: dict[str, float]) -> dict[str, float]:
    """Seconds by part; together they are the time of the step, evaluations apart."""
    seconds = {part: row.get(name, 0.0) for part, name in PARTS.items()}
    seconds["trainer forward and backward"] -= seconds["optimizer"]
    seconds["rollout beside the forward passes"] -= seconds["engine forward"]
    accounted = sum(seconds.values())
    seconds["everything else"] = max(0.0, row["perf/step_time"] - accounted)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder of a finished run (with metrics.jsonl)"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/step_overhead.json"))
    options = parser.parse_args()
    if not (options.run_dir / "metrics.jsonl").is_file():
        parser.error(f"--run-dir {options.run_dir} has no metrics.jsonl: it is no folder of a run")
    steps = [split(row) for row in read_steps(options.run_dir)[SKIPPED_STEPS:]]
    if not steps:
        raise SystemExit(f"{options.run_dir} has no more than {SKIPPED_STEPS} steps: nothing to measure")
    medians = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    total = sum(medians.values())
    overhead = 1 - (medians["engine forward"] + medians["trainer forward and backward"]) / total
    print(f"{len(steps)} steps, medians of {total:.2f} s")
    for part, seconds in medians.items():
        print(f"  {part:36s} {seconds:8.3f} s  {seconds / total:6.1%}")
    print(f"  overhead: {overhead:.1%}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"seconds": medians, "overhead": overhead, "steps": len(steps)}, indent=1)
    )


if __name__ == "__main__":
    main()
