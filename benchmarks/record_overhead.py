"""What do the record of samples, the advice and the trackers cost, of a training step?

    python benchmarks/record_overhead.py                            # beside the step of docs/performance.md
    python benchmarks/record_overhead.py --run-dir runs/smollm2/rl  # beside the steps of a run of yours
    python benchmarks/record_overhead.py --pairs 2 --config run.yaml  # a run against the same without them

What the samples and metrics of a step of the SmolLM2 quick start cost until they lie in record.db, in
metrics.jsonl and in TensorBoard's files, in CPU seconds, so that a busy machine changes nothing, with the
start of each part spread over the steps; against the seconds of a step on two idle cores. Goal: 1%.

`--pairs`: runs of the settings of `--config` in turns, with samples and advice and with neither; the ratio of
their step times and of the CPU seconds of their drivers. An idle machine is needed for the first.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from slime.observability.advisories import Advisor, Facts
from slime.observability.tracking import Tracker, read_metrics
from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.utils.types import Sample

GOAL = 0.01
PROMPTS, COPIES, PROMPT_TOKENS, ANSWER_TOKENS = 6, 8, 45, 30
STEP_S = 11.467  # of the quick start with SmolLM2-135M, two idle cores


def make_groups(step: int) -> list[list[Sample]]:
    draw = random.Random(step)
    return [[_sample(draw, group, copy) for copy in range(COPIES)] for group in range(PROMPTS)]


def _sample(draw: random.Random, group: int, copy: int) -> Sample:
    return Sample(
        group_index=group,
        index=group * COPIES + copy,
        prompt="What is 12 + 30? Answer with a number. " * 4,
        tokens=[draw.randrange(49152) for _ in range(PROMPT_TOKENS + ANSWER_TOKENS)],
        response="The answer is 42. " * (ANSWER_TOKENS // 5),
        response_length=ANSWER_TOKENS,
        label="42",
        reward=float(draw.random() > 0.5),
        rollout_log_probs=[-draw.random() for _ in range(ANSWER_TOKENS)],
        loss_mask=[1] * ANSWER_TOKENS,
        version_spans=[("run:1", 0, ANSWER_TOKENS)],
        status=Sample.Status.COMPLETED,
    )


def reports(step: int) -> list[tuple[str, dict[str, float]]]:
    """As many reports and numbers as a step of a real run logs."""
    counts = {"rollout": 40, "train": 25, "perf": 15}
    return [(axis, {f"{axis}/metric_{i}": step * 0.1 + i for i in range(n)}) for axis, n in counts.items()]


def cpu_seconds(function: Callable[[], object]) -> float:
    """Of this process with all of its threads, and of children that have ended."""

    def now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    started = now()
    function()
    return now() - started


def costs(folder: Path, num_steps: int) -> dict[str, float]:
    """CPU seconds of a step by part; the start of each is spread over the steps."""
    made = [make_groups(step) for step in range(num_steps)]

    def write_record() -> None:
        writer = RecordWriter(folder / RECORD_FILE, "run", 1 << 30)
        for step, groups in enumerate(made):
            writer.add("train", step, group_entries(groups, "trained"), version="run:1")
        writer.close()

    def advise() -> None:
        advisor = Advisor(Facts(COPIES, 512, 2048, True, False, True))
        for step in range(num_steps):
            for _, values in reports(step):
                advisor.observe(values, step)

    def log(**flags: object) -> None:
        with Tracker(SimpleNamespace(tracker_samples=16, **flags), folder) as tracker:
            for step in range(num_steps):
                for axis, values in reports(step):
                    tracker.log(values, f"{axis}/step", step)

    parts = {"record of samples": write_record, "advice": advise, "metrics.jsonl": log}
    parts["TensorBoard, in its own process"] = lambda: log(use_tensorboard=True)
    return {part: cpu_seconds(act) / num_steps for part, act in parts.items()}


# The driver of a run that says what it cost; without advice where the first word is `off`.
_DRIVER = """
import sys, time
from slime.arguments import parse_args
from slime.cluster import start
from slime.loop import train

class Silent:
    def at_start(self): return []
    def observe(self, metrics, step): return []

if sys.argv[1] == "off":
    start.Advisor = lambda facts: Silent()
train(parse_args(sys.argv[2:]))
print("CPU-SECONDS", time.process_time())
"""


def run_once(config: Path, folder: Path, *, on: bool) -> tuple[float, float]:
    """(median seconds of a step, CPU seconds of the driver in a step) of one run."""
    words = ["--config", str(config), "--run-dir", str(folder), "--quiet", "--no-auto-resume"]
    words += ["--save", str(folder / "checkpoints"), "--save-hf", str(folder / "hf-{rollout_id}")]
    words += [] if on else ["--record-max-mib", "0"]
    command = [sys.executable, "-c", _DRIVER, "on" if on else "off", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    cpu = float(done.stdout.split("CPU-SECONDS")[1].split()[0])
    steps = [row["perf/step_time"] for row in read_metrics(folder) if "perf/step_time" in row]
    return statistics.median(steps[2:] or steps), cpu / len(steps)


def compare_runs(config: Path, pairs: int, results: Path) -> int:
    """Runs in turns, so that what else the machine does falls on both."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for on in (True, False) if pair % 2 else (False, True):
                found[on].append(run_once(config, Path(folder) / f"{pair}-{on}", on=on))
    step, cpu = ([min(run[part] for run in found[on]) for on in (True, False)] for part in (0, 1))
    print(f"step: {step[0]:.3f} s with, {step[1]:.3f} s without: ratio {step[0] / step[1]:.4f}")
    extra = (cpu[0] - cpu[1]) / step[1]
    print(f"driver's CPU a step: {cpu[0]:.4f} s with, {cpu[1]:.4f} s without: {extra:+.3%} of a step")
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps({"step": step, "driver_cpu": cpu, "share": extra}, indent=1))
    return 0 if extra <= GOAL else 1


def step_seconds(run_dir: Path | None) -> float:
    """Median of a run's steps, less the first two, which load code and fill caches."""
    if run_dir is None:
        return STEP_S
    rows = [row for row in read_metrics(run_dir) if "perf/step_time" in row]
    return statistics.median(row["perf/step_time"] for row in rows[2:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="whose samples are recorded")
    parser.add_argument("--run-dir", type=Path, help="of a finished run, whose steps are the measure")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/record_overhead.json"))
    parser.add_argument("--pairs", type=int, default=0, help="runs with and without, instead")
    parser.add_argument("--config", type=Path, help="settings of these runs, as of `slime train --config`")
    options = parser.parse_args()
    if options.pairs:
        if options.config is None:
            parser.error("--pairs runs the settings of --config")
        return compare_runs(options.config, options.pairs, options.json)
    with tempfile.TemporaryDirectory() as folder:
        parts = costs(Path(folder), options.steps)
    whole = step_seconds(options.run_dir)
    print(f"of a step of {whole:.2f} s")
    for part, seconds in parts.items():
        print(f"  {part:34s} {1000 * seconds:7.2f} ms  {seconds / whole:7.3%}")
    share = sum(parts.values()) / whole
    print(f"  together {share:.3%} (goal {GOAL:.0%})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"cpu_seconds": parts, "step": whole, "share": share}, indent=1))
    return 0 if share <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
