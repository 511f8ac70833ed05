"""What do the record of samples, the advice and the trackers cost, of a training step?

    python benchmarks/record_overhead.py                            # beside the step of docs/performance.md
    python benchmarks/record_overhead.py --run-dir runs/smollm2/rl  # beside the steps of a run of yours
    python benchmarks/record_overhead.py --run quickstart --model smollm2 --num-rollout 5   # all in one run

What the samples and metrics of a step of the SmolLM2 quick start cost until they lie in record.db, in
metrics.jsonl and in TensorBoard's files, in CPU seconds, so that a busy machine changes nothing, with the
start of each part spread over the steps; against the seconds of a step on two idle cores. Goal: 1%.

`--run`: a run of that `slime` command, in which both sides are CPU seconds: those of the threads and calls
that record, show samples and advise, against those of all processes of the run. The load of the machine is
in both. The goal is then that of the ledger: the driver's calls, and of the writer's thread everything but
what is no event of a group or a sample (spans of the timeline, texts of tokens, advantages, what is done
now). So the groups and samples that readers see count as ledger, and all transactions do.
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.cli.main import main as slime_command
from slime.cluster.driver_spans import Timeline
from slime.cluster.recording import Recording
from slime.observability.advisories import Advisor, Facts
from slime.observability.tracking import Tracker, read_metrics
from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.rollout.ledger import Ledger
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
        record = RecordWriter(folder / RECORD_FILE, "run", 1 << 30)
        for step, groups in enumerate(made):
            record.add("train", step, group_entries(groups, "trained"), version="run:1")
        record.close()

    def advise() -> None:
        advisor = Advisor(Facts(COPIES, 512, 2048, True, False, True))
        for step in range(num_steps):
            for _, values in reports(step):
                advisor.observe(values, step)

    def log(**flags: object) -> None:
        with Tracker(SimpleNamespace(limits={}, **flags), folder) as tracker:
            for step in range(num_steps):
                for axis, values in reports(step):
                    tracker.log(values, f"{axis}/step", step)

    parts = {"record of samples": write_record, "advice": advise, "metrics.jsonl": log}
    parts["TensorBoard, in its own process"] = lambda: log(use_tensorboard=True)
    return {part: cpu_seconds(act) / num_steps for part, act in parts.items()}


_WRITER = "ledger, spans and texts: transactions, pruning and waking of the writer"
_THREADS = {"record": _WRITER, "screen": "screen", "quickstart-metrics": "screen"}
# Methods of the writer.
_PARTS_WRITTEN = {
    "_write_notes": "ledger: events, unfinished rollouts, batch and buffer, written",
    "_write": "ledger: groups and samples, written",
}


class Meter:
    """CPU seconds of everything that a run does only to record, to show samples and to advise.

    Two threads of the driver do nothing else, the writer of the record and the screen; the writer's time is
    told apart by what it writes. What other threads spend in calls of the ledger, the recording and the
    advisor is added up call by call, the outermost of nested ones alone.
    """

    def __init__(self) -> None:
        self.calls: dict[str, float] = defaultdict(float)
        self._inside = threading.local()

    def watch(self, owner: type, part: str) -> None:
        for name, function in list(vars(owner).items()):
            if not name.startswith("_") and inspect.isfunction(function):
                setattr(owner, name, self._timed(function, part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "here", False) or threading.current_thread().name in _THREADS:
                return function(*args, **kwargs)
            self._inside.here, started = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.here = False
                self.calls[part] += time.thread_time() - started

        return timed

    def watch_writer(self) -> None:
        for name, part in _PARTS_WRITTEN.items():
            setattr(RecordWriter, name, self._written(getattr(RecordWriter, name), part))

    def _written(self, write: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(write)
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return write(*args)
            finally:
                seconds = time.thread_time() - started
                self.calls[part] += seconds
                self.calls[_WRITER] -= seconds

        return timed

    def now(self) -> dict[str, float]:
        found = dict(self.calls)
        for thread in threading.enumerate():
            if thread.name in _THREADS and thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                part = _THREADS[thread.name]
                found[part] = found.get(part, 0.0) + time.clock_gettime(clock)
        return found | {"whole": family_cpu_seconds()}


def family_cpu_seconds() -> float:
    """Of this process and all that descend from it: engines, trainer, rewards."""
    parents, spent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            spent[int(stat.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def is_ours(process: int) -> bool:
        while process not in (os.getpid(), 0, 1):
            process = parents.get(process, 0)
        return process == os.getpid()

    return sum(seconds for process, seconds in spent.items() if is_ours(process))


def measure_run(command: list[str], options: argparse.Namespace) -> int:
    """What the steps of a run of `slime COMMAND` spent; the first, which starts parts, is left out."""
    meter, steps_of = Meter(), defaultdict(list)
    for owner, part in (
        (Ledger, "ledger: the driver's calls"),
        (Recording, "recording"),
        (Advisor, "advice"),
    ):
        meter.watch(owner, part)
    meter.watch_writer()
    end_step = Timeline.end_step

    def end_and_measure(timeline: Timeline, *about: Any) -> None:
        end_step(timeline, *about)
        steps_of[timeline].append(meter.now())

    Timeline.end_step = end_and_measure  # type: ignore[method-assign]
    failed = slime_command(command)
    steps = list(steps_of.values())[-1] if steps_of else []  # a quick start warms up first
    if failed or len(steps) < 3:
        raise SystemExit(f"`slime {' '.join(command)}` was to make at least three steps")
    count, (first, last) = len(steps) - 1, (steps[0], steps[-1])
    spent = {part: (value - first.get(part, 0.0)) / count for part, value in last.items()}
    return tell(spent.pop("whole"), spent, options, f"CPU, {count} steps")


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
    parser.add_argument("--goal", type=float, default=GOAL, help="share of a step; 0.03 for the tiny model")
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, help="measure a run of this `slime` command instead"
    )
    options = parser.parse_args()
    if options.run:
        return measure_run(options.run, options)
    with tempfile.TemporaryDirectory() as folder:
        parts = costs(Path(folder), options.steps)
    return tell(step_seconds(options.run_dir), parts, options, "wall")


def tell(whole: float, parts: dict[str, float], options: argparse.Namespace, of: str) -> int:
    print(f"of a step of {whole:.3f} s ({of})")
    for part, seconds in parts.items():
        print(f"  {part:34s} {1000 * seconds:7.2f} ms  {seconds / whole:7.3%}")
    share = sum(parts.values()) / whole
    ledger = sum(seconds for part, seconds in parts.items() if part.startswith("ledger")) / whole
    judged = ledger if options.run else share
    words = f"of which the ledger {ledger:.3%} " if options.run else ""
    print(f"  together {share:.3%} {words}(goal {options.goal:.0%})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    told = {"cpu_seconds": parts, "step": whole, "share": share, "ledger": ledger}
    options.json.write_text(json.dumps(told, indent=1))
    return 0 if judged <= options.goal else 1


if __name__ == "__main__":
    raise SystemExit(main())
