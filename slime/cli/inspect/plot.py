"""`slime plot RUN [RUN...]`: plot metrics of one or several runs, in the terminal or as a picture.

Runs that differ by their seed, and by nothing else, are one curve: their
mean, and a band of one standard deviation.
"""

import argparse
import fnmatch
import re
import statistics
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from slime.catalog.loss_types import curves_of
from slime.catalog.metrics import is_eval_score
from slime.cli.inspect import MISTAKE, command, need_run
from slime.observability.tracking import read_metrics
from slime.utils.files.run_file import read_run

# Plotted after the curves that show whether the runs learn.
DEFAULT = (
    "eval/*",  # scores only; other metrics of evaluations need --metric
    "train/loss",
    "rollout/response_len/mean",
    "train/grad_norm",
    "train/entropy_loss",
)
_COLUMNS = 60
_BLOCKS = "▁▂▃▄▅▆▇█"

Curve = dict[int, float]
Group = list[dict[str, Curve]]  # the curves of each run by metric


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    groups = _groups(options.run, by_seed=not options.each)
    known = sorted({key for group in groups.values() for curves in group for key in curves})
    shown = [key for key in known if options.metric or not key.startswith("eval/") or is_eval_score(key)]
    patterns = options.metric or (*_main_curves(options.run), *DEFAULT)
    found = {pattern: fnmatch.filter(shown, pattern) for pattern in patterns}
    names = list(dict.fromkeys(name for matches in found.values() for name in matches))
    unknown = [pattern for pattern, matches in found.items() if options.metric and not matches]
    if options.list or not names or unknown:
        for pattern in unknown:
            near = get_close_matches(pattern, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "--list shows their names."
            print(f"error: --metric {pattern!r}: no such metric in these runs; {hint}", file=sys.stderr)
        if options.list or not options.metric:
            print("\n".join(known) or f"{', '.join(options.run)}: no metric is logged")
        return 0 if options.list else MISTAKE
    if options.out:
        _draw_png(groups, names, Path(options.out))
        return 0
    for name in names:
        print("\n".join(_draw_text(name, _of_metric(groups, name))))
    return 0


def _main_curves(folders: Sequence[str]) -> list[str]:
    """Return the metrics that show whether these runs learn, the main ones first."""
    runs = [run.last.values if (run := read_run(Path(name))) is not None else {} for name in folders]
    return [curve.metric for run in runs for curve in curves_of(run)]


def _groups(folders: Sequence[str], *, by_seed: bool) -> dict[str, Group]:
    """Read the runs; those whose settings differ by the seed only are one group under one label."""
    alike: dict[str, dict[str, dict[str, Curve]]] = {}
    seeds: set[tuple[str, str]] = set()
    for name in dict.fromkeys(folders):
        record = read_run(Path(name)) if by_seed else None
        key = record.settings_without_seed() if record is not None else None
        if record is None or key is None or (key, record.seed) in seeds:
            key = name  # a repetition is no further seed
        else:
            seeds.add((key, record.seed))
        alike.setdefault(key, {})[name] = _curves(Path(name))
    return {_label(list(runs)): list(runs.values()) for runs in alike.values()}


def _label(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{re.sub(r'[-_,/]?(seed)?[-_=]?[0-9]+$', '', names[0])} ({len(names)} seeds)"


def _of_metric(groups: dict[str, Group], name: str) -> dict[str, list[Curve]]:
    """Return the curves of one metric by the label of their group."""
    found = {label: [curves[name] for curves in group if name in curves] for label, group in groups.items()}
    return {label: curves for label, curves in found.items() if curves}


def _mean_and_band(curves: list[Curve]) -> tuple[Curve, Curve]:
    """Return the mean at each step, and the standard deviation over the runs that have logged it."""
    steps = sorted({step for curve in curves for step in curve})
    values = {step: [curve[step] for curve in curves if step in curve] for step in steps}
    mean = {step: statistics.fmean(found) for step, found in values.items()}
    return mean, {step: statistics.stdev(found) if found[1:] else 0.0 for step, found in values.items()}


def _curves(folder: Path) -> dict[str, Curve]:
    """Read {metric: {step: value}} of a run; where a step was logged twice, the later value counts."""
    file = folder / "metrics.jsonl" if folder.is_dir() else folder
    if not file.is_file():
        need_run(folder)
        raise ValueError(f"{folder}: the run has logged nothing yet.")
    curves: dict[str, Curve] = {}
    for row in read_metrics(file):
        step = row.get("step")
        for key, value in row.items():
            if isinstance(step, int) and "/" in key and type(value) in (int, float):
                curves.setdefault(key, {})[step] = float(value)
    return curves


def _draw_text(name: str, groups: dict[str, list[Curve]]) -> list[str]:
    """Draw each group as a strip of blocks with its first and last value; all share one x-axis."""
    lines = [name]
    width = max(map(len, groups))
    bands = {label: _mean_and_band(found) for label, found in groups.items()}
    curves = {label: mean for label, (mean, _) in bands.items()}
    values = [value for curve in curves.values() for value in curve.values()]
    low, high = min(values), max(values)
    axis = sorted({step for curve in curves.values() for step in curve})
    count = min(len(axis), _COLUMNS)
    for run, curve in curves.items():
        first, last = min(curve), max(curve)
        strip, block = "", " "
        for column in range(count):
            steps = axis[len(axis) * column // count : len(axis) * (column + 1) // count]
            found = [curve[step] for step in steps if step in curve]
            if found:
                height = (sum(found) / len(found) - low) / (high - low) if high > low else 0.5
                block = _BLOCKS[round(height * 7)]
            strip += block if steps[0] <= last else " "  # a gap repeats the previous value
        band = f" ± {bands[run][1][last]:.2g}" if len(groups[run]) > 1 else ""
        ends = f"{curve[first]:.4g} -> {curve[last]:.4g}{band} (steps {first} to {last})"
        lines.append(f"  {run:<{width}} {strip} {ends}")
    return [*lines, f"  {'':<{width}} from {low:.4g} to {high:.4g}", ""]


def _draw_png(groups: dict[str, Group], names: list[str], out: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--out needs matplotlib: pip install 'slime-rl[plot]', or remove --out") from None
    figure, axes = pyplot.subplots(len(names), 1, figsize=(8, 2.6 * len(names)), squeeze=False, sharex=True)
    for axis, name in zip(axes[:, 0], names, strict=True):
        for label, curves in _of_metric(groups, name).items():
            mean, band = _mean_and_band(curves)
            steps = list(mean)
            [line] = axis.plot(steps, mean.values(), label=label, marker="." if len(steps) < 30 else "")
            if len(curves) > 1:
                below, above = ([mean[s] + side * band[s] for s in steps] for side in (-1, 1))
                axis.fill_between(steps, below, above, alpha=0.2, color=line.get_color())
        axis.set_title(name, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    if len(groups) > 1:
        axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder; name a file in it")
        out = out if out.suffix else out.with_name(f"{out.name}.png")  # matplotlib adds it silently
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {out} cannot be written: {error}") from None
    print(f"wrote {out}: {', '.join(names)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime plot", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("run", nargs="+", metavar="RUN", help="folder of a run")
    metric = "a metric, or a pattern such as 'eval/*'; may repeat"
    add("-m", "--metric", action="append", metavar="NAME", help=metric)
    picture = "write a picture (.png, .pdf, .svg) instead of plotting in the terminal"
    add("--out", metavar="FILE", help=picture)
    add("--each", action="store_true", help="draw each run, even if they differ by their seed only")
    add("--list", action="store_true", help="list the names of all metrics of these runs")
    return parser
