"""Tables and curves of benchmarks/real_task.py, and how a repeated part compares with the published one."""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from real_task_data import EVALUATIONS, TASKS

Report = dict[str, Any]
LAST = 5  # steps that a final reward is the mean of
SKIPPED = 2  # first steps that seconds of a step leave out
TITLES = {"grpo": "slime, embedded engine", "sglang": "slime, SGLang", "trl": "TRL"}
TITLES |= {"trl_batched": "TRL, continuous batching", "ppo": "slime, PPO", "lora": "slime, LoRA of rank 32"}
TITLES |= {"fp8": "slime, FP8 rollout", "sync": "slime, engine beside the trainer, synchronous"}
TITLES |= {"async": "slime, engine beside the trainer, asynchronous"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000", "#f0e442")


def runs_of(results: Report, *, finished: bool = True) -> dict[str, list[tuple[str, Report]]]:
    """Return the RL runs with at least one step by variant, each with its seed."""
    found: dict[str, list[tuple[str, Report]]] = {}
    for part, report in results["parts"].items():
        name, _, seed = part.rpartition("-")
        if name in TITLES and rewards(report) and (report["finished"] or not finished):
            found.setdefault(name, []).append((seed, report))
    return {name: sorted(found[name]) for name in TITLES if name in found}


def steps_of(report: Report) -> list[Report]:
    return [step for step in report.get("steps", []) if step.get("reward") is not None]


def rewards(report: Report) -> list[float]:
    return [step["reward"] for step in steps_of(report)]


def step_seconds(report: Report) -> list[float]:
    """Return the seconds of each step but the first ones, from one end of a step to the next."""
    ends = [step["seconds"] for step in steps_of(report)]
    return [after - before for before, after in itertools.pairwise(ends)][SKIPPED - 1 :]


def final(report: Report) -> float:
    return statistics.fmean(rewards(report)[-LAST:])


def spread(values: Sequence[float], digits: int = 1, factor: float = 100) -> str:
    """Return mean and standard deviation: `41.2 ± 0.8`; a single value alone."""
    scaled = [value * factor for value in values]
    mean = f"{statistics.fmean(scaled):.{digits}f}"
    return f"{mean} ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else mean


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def accuracy_table(results: Report) -> str:
    """Return greedy accuracy in percent, with mean and standard deviation over the seeds."""
    groups: dict[str, list[Report]] = {}
    for part, report in results["parts"].items():
        if part.startswith("eval:") and report["finished"]:
            name, _, seed = part.removeprefix("eval:").rpartition("-")
            is_run = name in TITLES and seed.isdigit()
            groups.setdefault(name if is_run else part.removeprefix("eval:"), []).append(report)
    order = ["base", "sft-0", "sft-1", "sft-2", "sft-3", "start", *TITLES]
    rows = []
    for name in (name for name in order if name in groups):
        reports = groups[name]
        title = {"base": "SmolLM2-135M-Instruct", "start": "after SFT, the start of RL"}.get(name)
        cells = [
            spread([r["scores"][s] for r in reports]) if all(s in r["scores"] for r in reports) else ""
            for s in EVALUATIONS
        ]
        rows.append([title or TITLES.get(name, f"snapshot {name}"), str(len(reports)), *cells])
    return table(["greedy accuracy, %", "seeds", *EVALUATIONS], rows)


def by_step_table(results: Report) -> str:
    """Return the sampled reward of windows of steps."""
    runs = runs_of(results, finished=False)
    longest = max(len(rewards(report)) for made in runs.values() for _, report in made)
    windows = [range(first, min(first + LAST, longest)) for first in range(0, longest, 2 * LAST)]
    windows.append(range(max(0, longest - LAST), longest))
    rows = []
    for name, made in runs.items():
        cells = []
        for window in windows:
            means = [
                statistics.fmean(rewards(r)[i] for i in window)
                for _, r in made
                if len(rewards(r)) > window[-1]
            ]
            cells.append(spread(means) if means else "")
        rows.append([TITLES[name], str(len(made)), *cells])
    heads = [f"{window[0] + 1} to {window[-1] + 1}" for window in windows]
    return table(["mean reward, %, of steps", "seeds", *heads], rows)


def time_table(results: Report) -> str:
    """Return the seconds of runs that had the device for themselves, or else of those beside others."""
    rows = []
    for name, made in runs_of(results, finished=False).items():
        for seed, report in made:
            spent, steps = step_seconds(report), steps_of(report)
            if not spent:
                continue
            busy = steps[-1]["seconds"] - steps[0]["seconds"]
            tokens = sum(step.get("tokens") or 0 for step in steps[1:])
            others = len(report["beside"])
            rows.append(
                [
                    f"{TITLES[name]}, seed {seed}",
                    f"{others} others" if others else "none",
                    str(len(steps)) + ("" if report["finished"] else ", ended"),
                    f"{steps[0]['seconds']:.0f}",
                    f"{statistics.median(spent):.2f}",
                    f"{tokens / busy:,.0f}" if busy and tokens else "",
                    f"{steps[-1]['seconds']:.0f}",
                    f"{final(report) * 100:.1f}",
                ]
            )
    heads = ["run", "beside it", "steps", "start and first step, s", "median step, s", "response tokens/s"]
    return table([*heads, "total, s", f"reward of the last {LAST} steps, %"], rows)


def variants_table(results: Report) -> str:
    rows = []
    for name, made in runs_of(results).items():
        evaluated = [results["parts"].get(f"eval:{name}-{seed}", {}).get("scores", {}) for seed, _ in made]
        held = [statistics.fmean(scores[t] for t in TASKS) for scores in evaluated if scores]
        gaps = [s["logprob_diff"] for _, r in made for s in steps_of(r) if s.get("logprob_diff") is not None]
        rows.append(
            [
                TITLES[name],
                str(len(made)),
                spread([rewards(r)[0] for _, r in made]),
                spread([final(r) for _, r in made]),
                spread(held) if held else "",
                f"{statistics.fmean(gaps):.4f}" if gaps else "",
            ]
        )
    heads = ["run", "seeds", "reward of step 1, %", f"of the last {LAST} steps, %"]
    return table([*heads, "greedy, mean of the four tasks, %", "log-prob difference"], rows)


def reached_table(results: Report) -> str:
    """Return samples and seconds until the mean of LAST steps first reaches a reward."""
    runs = runs_of(results, finished=False)
    first = statistics.fmean(rewards(r)[0] for made in runs.values() for _, r in made)
    best = max(final(r) for made in runs.values() for _, r in made)
    levels = [first + (best - first) * share for share in (0.25, 0.5, 0.75)]
    per_step = int(results["settings"]["prompts"]) * int(results["settings"]["samples"])
    rows = []
    for name, made in runs.items():
        for seed, report in made:
            curve, steps = rewards(report), steps_of(report)
            smooth = [statistics.fmean(curve[max(0, i - LAST + 1) : i + 1]) for i in range(len(curve))]
            cells = []
            for level in levels:
                at = next((i for i, value in enumerate(smooth) if value >= level), None)
                cells.append("" if at is None else f"{(at + 1) * per_step:,}, {steps[at]['seconds']:.0f} s")
            alone = "" if report["beside"] else ", alone"
            rows.append([f"{TITLES[name]}, seed {seed}{alone}", *cells])
    return table(["samples and seconds until", *(f"{level:.1%}" for level in levels)], rows)


def draw(results: Report, path: Path) -> None:
    """Draw the reward by step, with the range over the seeds, and by second for the runs that were alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for colour, (name, made) in zip(COLOURS, runs_of(results, finished=False).items(), strict=False):
        length = min(len(rewards(report)) for _, report in made)
        curves = [smoothed(rewards(report)[:length]) for _, report in made]
        steps, middle = range(1, length + 1), [statistics.fmean(v) for v in zip(*curves, strict=True)]
        by_step.plot(steps, middle, color=colour, label=f"{TITLES[name]} ({len(made)})")
        if len(made) > 1:
            low, high = ([pick(v) for v in zip(*curves, strict=True)] for pick in (min, max))
            by_step.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        for _, report in (run for run in made if not run[1]["beside"]):
            seconds = [step["seconds"] for step in steps_of(report)]
            by_second.plot(seconds, smoothed(rewards(report)), color=colour)
    by_step.set(xlabel="step", ylabel=f"mean reward of {LAST} steps", title="by step (number of seeds)")
    by_second.set(xlabel="seconds since the command started", title="by second, alone on the GPU")
    by_step.legend(frameon=False, fontsize=8)
    for axes in (by_step, by_second):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smoothed(curve: Sequence[float]) -> list[float]:
    return [statistics.fmean(curve[max(0, i - LAST + 1) : i + 1]) for i in range(len(curve))]


def compare(options: argparse.Namespace) -> int:
    """Print the tables, and draw the figure."""
    results = json.loads(options.json.read_text())
    print(f"{results['machine']}; start of RL: {results.get('start', options.start)}\n")
    parts: list[Callable[[Report], str]] = [accuracy_table]
    if runs_of(results, finished=False):
        parts += [by_step_table, time_table, reached_table, variants_table]
        if options.figure:
            draw(results, options.figure)
    print("\n\n".join(part(results) for part in parts))
    return 0


def reproduce(options: argparse.Namespace, extra: list[str], run: Callable[..., int]) -> int:
    """Run parts again and compare each with the published one: 1 if one is worse than chance explains."""
    if not options.published.is_file():
        sys.exit(f"--published {options.published} is missing: there is no result to compare with.")
    published = json.loads(options.published.read_text())
    for key in ("steps", "prompts", "samples", "max_tokens", "sft_rows", "sft_batch"):
        setattr(options, key, int(published["settings"][key]))
    for key in ("lr", "sft_lr", "start_score"):
        setattr(options, key, float(published["settings"][key]))
    wanted = list(options.parts)
    evaluations = [f"eval:{part}" for part in wanted if f"eval:{part}" in published["parts"]]
    if not options.start and any(not part.startswith("eval:") and part != "sft" for part in wanted):
        options.start = str(options.work / "sft" / f"model-{published['start'].removeprefix('sft-')}")
        options.parts = ["sft", *wanted]
    options.parts += evaluations
    code, worse = run(options, extra), False
    results = json.loads(options.json.read_text())
    for part in (*wanted, *evaluations):
        old, new = (found["parts"].get(part, {}) for found in (published, results))
        for name, before, after, noise in compared(old, new):
            is_worse = after < before - 3 * noise
            worse |= is_worse
            print(f"{part} {name}: published {before:.3f}, now {after:.3f}{' WORSE' if is_worse else ''}")
    return code or int(worse)


def compared(old: Report, new: Report) -> list[tuple[str, float, float, float]]:
    """Return the values that both have, with the standard error of their difference."""
    found = []
    for name, before in old.get("scores", {}).items():
        if name in new.get("scores", {}):
            count = {"gsm8k": 1211, "gsm8k_similar": 108}.get(name, 256)
            noise = math.sqrt(2 * max(before * (1 - before), 0.01) / count)
            found.append((name, before, new["scores"][name], noise))
    if rewards(old) and rewards(new):
        # Over a few hundred prompts; the difference between seeds is of this size, too.
        noise = math.sqrt(2 * 0.25 / (64 * LAST))
        found.append((f"reward of the last {LAST} steps", final(old), final(new), noise))
    return found
