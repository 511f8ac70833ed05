"""Are two reward curves the same? Runs of several seeds each, with the spread between seeds as the noise.

Two numbers per pair: how far the means over all steps lie apart, in units of that spread, and by how many
steps one curve is behind the other. The second says more where learning is steep: a policy that learns as
well from answers that are a step old has the same curve, a step later.
"""

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"mean difference {self.difference:+.4f}, {self.difference_in_spreads:+.1f} spreads of plain "
            f"seeds ({self.spread:.4f}; {self.step_spread:.4f} at a step); behind by {self.behind:+.2f} "
            f"steps (each {_listed(self.behind_each)}; plain against plain {_listed(self.plain_each)})"
        )


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.2f}" for value in values)


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
    rest = [mean_curve(plain[:i] + plain[i + 1 :]) for i in range(len(plain))]
    return Comparison(
        difference=difference,
        spread=spread,
        difference_in_spreads=difference / spread if spread else math.inf,
        step_spread=statistics.fmean(statistics.stdev(values) for values in zip(*plain, strict=True)),
        behind=behind(mean_curve(other), reference),
        behind_each=[behind(curve, reference) for curve in other],
        plain_each=[behind(curve, others) for curve, others in zip(plain, rest, strict=True)],
    )
