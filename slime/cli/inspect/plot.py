"""`slime plot RUN [RUN...]`: plot metrics of one or several runs, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slime.catalog.metrics import is_eval_score
from slime.cli.inspect import MISTAKE, command, need_run
from slime.observability.tracking import read_metrics

DEFAULT = (
    "rollout/raw_reward",
    "eval/*",  # scores only; other metrics of evaluations need --metric
    "train/loss",
    "rollout/response_len/mean",
    "train/grad_norm",
    "train/entropy_loss",
)
_ROWS, _COLUMNS = 8, 60
_BLOCKS = " ▁▂▃▄▅▆▇█"

Curve = dict[int, float]


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    runs = {name: _curves(Path(name)) for name in options.run}
    known = sorted({key for curves in runs.values() for key in curves})
    shown = [key for key in known if options.metric or not key.startswith("eval/") or is_eval_score(key)]
    names, unknown = _chosen(options.metric or DEFAULT, shown)
    if options.list or not names or (options.metric and unknown):
        for pattern in unknown if options.metric else ():
            near = get_close_matches(pattern, known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            print(f"error: no metric {pattern!r} in these runs{hint}", file=sys.stderr)
        if options.list or not options.metric:
            print("\n".join(known) or "nothing is logged yet")
        return 0 if options.list else MISTAKE
    if options.out:
        return _draw_png(runs, names, Path(options.out))
    for name in names:
        print("\n".join(_draw_text(name, {run: c[name] for run, c in runs.items() if name in c})))
    return 0


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
            if isinstance(step, int) and "/" in key and _is_number(value):
                curves.setdefault(key, {})[step] = float(value)
    return curves


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _chosen(patterns: Iterable[str], known: Sequence[str]) -> tuple[list[str], list[str]]:
    names: list[str] = []
    unknown = []
    for pattern in patterns:
        found = [name for name in fnmatch.filter(known, pattern) if name not in names]
        names += found
        if not fnmatch.filter(known, pattern):
            unknown.append(pattern)
    return names, unknown


def _draw_text(name: str, curves: dict[str, Curve]) -> list[str]:
    """Draw each run as a strip of blocks with its first and last value; all share one x-axis."""
    lines = [name]
    width = max(map(len, curves))
    values = [value for curve in curves.values() for value in curve.values()]
    low, high = min(values), max(values)
    axis = sorted({step for curve in curves.values() for step in curve})
    for run, curve in curves.items():
        points = [curve[step] for step in sorted(curve)]
        steps = f"steps {min(curve)} to {max(curve)}"
        columns = _columns(curve, axis, min(len(axis), _COLUMNS))
        strip = "".join(" " if value is None else _block(value, low, high) for value in columns)
        lines.append(f"  {run:<{width}} {strip} {points[0]:.4g} -> {points[-1]:.4g} ({steps})")
    return [*lines, f"  {'':<{width}} from {low:.4g} to {high:.4g}", ""]


def _block(value: float, low: float, high: float) -> str:
    return _BLOCKS[1 + round((value - low) / (high - low) * 7)] if high > low else _BLOCKS[4]


def _columns(curve: Curve, axis: list[int], count: int) -> list[float | None]:
    """Average a curve over `count` equal shares of the axis; a gap repeats the value before it."""
    columns: list[float | None] = []
    for i in range(count):
        steps = axis[len(axis) * i // count : len(axis) * (i + 1) // count]
        values = [curve[step] for step in steps if step in curve]
        before = columns[-1] if columns and steps[0] <= max(curve) else None
        columns.append(sum(values) / len(values) if values else before)
    return columns


def _draw_png(runs: dict[str, dict[str, Curve]], names: list[str], out: Path) -> int:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--out needs matplotlib: pip install 'slime[plot]', or leave --out out") from None
    figure, axes = pyplot.subplots(len(names), 1, figsize=(8, 2.6 * len(names)), squeeze=False, sharex=True)
    for axis, name in zip(axes[:, 0], names, strict=True):
        for run, curves in runs.items():
            if name in curves:
                steps = sorted(curves[name])
                values = [curves[name][step] for step in steps]
                axis.plot(steps, values, label=run, marker="." if len(steps) < 30 else "")
        axis.set_title(name, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        out = out if out.suffix else out.with_name(f"{out.name}.png")  # matplotlib adds it silently
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {out} cannot be written: {error}") from None
    print(f"wrote {out}: {', '.join(names)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-m",
        "--metric",
        action="append",
        metavar="NAME",
        help="a metric, or a pattern such as 'eval/*'; may repeat",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write a picture (.png, .pdf, .svg) instead of plotting in the terminal"
    )
    parser.add_argument("--list", action="store_true", help="list the names of all metrics of these runs")
    return parser
