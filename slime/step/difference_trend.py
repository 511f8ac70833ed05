"""Detects that log-probs of engine and trainer drift apart over pushes, though each push seems to arrive."""

from dataclasses import dataclass, field

GROWTH = 3.0  # times the difference after the first push
SHARE_OF_THRESHOLD = 0.25  # share of --logprob-diff-threshold; below it, growth is rounding
NUM_READINGS = 2  # consecutive readings that must be too far: a single batch may be odd
ENOUGH_TOKENS = 256  # of one reading


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference that grew: `Drift(first=0.038, now=0.33, num_pushes=3)` is nine times as much after 3."""

    first: float
    now: float
    num_pushes: int  # between the two


@dataclass
class DifferenceTrend:
    """Readings of one run, by weight version: the mean difference over the version's fresh tokens."""

    _first: tuple[int, float] | None = None  # version, difference
    _last: int = -1
    _apart: list[float] = field(default_factory=list)  # consecutive readings too far above the first

    def note(self, version: int, difference: float, num_tokens: int, threshold: float) -> Drift | None:
        """Record one reading per version; return a drift if the last readings have grown too far."""
        if num_tokens < ENOUGH_TOKENS or version <= self._last:
            return None
        self._last = version
        if self._first is None:
            self._first = (version, difference)
            return None
        first_version, first = self._first
        grown = difference > max(GROWTH * first, SHARE_OF_THRESHOLD * threshold)
        self._apart = [*self._apart, difference] if grown else []
        if len(self._apart) < NUM_READINGS:
            return None
        return Drift(first, difference, version - first_version)
