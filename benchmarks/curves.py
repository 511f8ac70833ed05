"""Are two reward curves the same? Runs of several seeds each, with the spread between seeds as the noise.

Told: how far the means over all steps lie apart, in units of that spread; by how many steps one curve is
behind the other; and how many steps each takes to begin to rise and for the middle half of the rise. A shift
says more than a difference where learning is steep: a curve of answers that are a step old is the same, a
step later. The rise says whether both learn at the same rate, and scatters least between seeds, since the
first steps are those that luck decides.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Curve = Sequence[float]
FARTHEST, GRID = 6.0, 0.05  # steps of a shift: how far is looked, and how finely


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of `other` runs with `plain` ones, each a curve per seed."""

    difference: float  # mean over steps and seeds, other - plain
    spread: float  # standard deviation over seeds of the mean over steps, of plain runs
    difference_in_spreads: float
    step_spread: float  # standard deviation over seeds at a step, of plain runs, averaged over steps
    behind: float  # steps by which the mean of the other runs is behind that of plain ones
    behind_each: list[float]  # each other run, against the mean of plain ones
    plain_each: list[float]  # each plain run, against the mean of the rest: the noise of such a shift
    levels: tuple[float, float]  # a quarter and three quarters of the way that plain runs make on average
    begins: tuple[list[float], list[float]]  # steps to the first level, plain and other; nan: never there
    rises: tuple[list[float], list[float]]  # steps from the first level to the second

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"mean difference {self.difference:+.4f}, {self.difference_in_spreads:+.1f} spreads of plain "
            f"seeds ({self.spread:.4f}; {self.step_spread:.4f} at a step); behind by {self.behind:+.2f} "
            f"steps (each {_listed(self.behind_each)}; plain against plain {_listed(self.plain_each)}); "
            f"steps to {self.levels[0]:.2f}: {_beside(self.begins)}, from there to {self.levels[1]:.2f}: "
            f"{_beside(self.rises)}"
        )


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.2f}" for value in values)


def _beside(steps: tuple[list[float], list[float]]) -> str:
    plain, other = (f"{statistics.fmean(found):.1f} ({_plainly(found)})" for found in steps)
    return f"plain {plain}, other {other}"


def _plainly(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def mean_curve(curves: Sequence[Curve]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def at(curve: Curve, step: float) -> float:
    """The curve between two of its steps."""
    low = min(math.floor(step), len(curve) - 2)
    return curve[low] + (step - low) * (curve[low + 1] - curve[low])


def behind(curve: Curve, reference: Curve) -> float:
    """Steps by which `curve` is behind: the shift at which the squares of the distances are least.

    Both must have moved: a flat curve is as far behind as one likes. Steps without a counterpart do not
    count, so at least half of the curve has to have one.
    """
    length = min(len(curve), len(reference))
    farthest = min(FARTHEST, length / 2)
    shifts = [i * GRID for i in range(-int(farthest / GRID), int(farthest / GRID) + 1)]

    def distance(shift: float) -> float:
        steps = [k for k in range(length) if 0 <= k - shift <= length - 1]
        return statistics.fmean((curve[k] - at(reference, k - shift)) ** 2 for k in steps)

    return min(shifts, key=distance)


def passes(curve: Curve, level: float) -> float:
    """The step at which the curve, a mean of three steps, is first at a level; nan where it never is."""
    smooth = [statistics.fmean(curve[max(0, k - 1) : k + 2]) for k in range(len(curve))]
    for k, (low, high) in enumerate(itertools.pairwise(smooth)):
        if low < level <= high:
            return k + (level - low) / (high - low)
    return math.nan


def compare(plain: Sequence[Curve], other: Sequence[Curve]) -> Comparison:
    """Needs two plain runs at least: their spread is the measure."""
    if len(plain) < 2:
        raise ValueError(f"{len(plain)} plain run: a spread needs two seeds or more.")
    length = min(len(curve) for curve in (*plain, *other))
    plain, other = ([list(curve[:length]) for curve in curves] for curves in (plain, other))
    means = [statistics.fmean(curve) for curve in plain]
    difference = statistics.fmean(statistics.fmean(curve) for curve in other) - statistics.fmean(means)
    spread = statistics.stdev(means)
    reference = mean_curve(plain)
    start, way = reference[0], reference[-1] - reference[0]
    levels = (start + way / 4, start + 3 * way / 4)
    begins, ends = ([[passes(c, level) for c in cs] for cs in (plain, other)] for level in levels)
    rises = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(begins, ends, strict=True)]
    rest = [mean_curve(plain[:i] + plain[i + 1 :]) for i in range(len(plain))]
    return Comparison(
        difference=difference,
        spread=spread,
        difference_in_spreads=difference / spread if spread else math.inf,
        step_spread=statistics.fmean(statistics.stdev(values) for values in zip(*plain, strict=True)),
        behind=behind(mean_curve(other), reference),
        behind_each=[behind(curve, reference) for curve in other],
        plain_each=[behind(curve, others) for curve, others in zip(plain, rest, strict=True)],
        levels=levels,
        begins=(begins[0], begins[1]),
        rises=(rises[0], rises[1]),
    )
