"""Counts generated work that was never trained on, by cause: in samples, tokens and request seconds.

Each group is counted once, when it is decided. Seconds are summed over concurrent requests. Finished groups
of the buffer or the ledger cost nothing here.
"""

from collections import Counter
from typing import Any

from slime.arguments import PluginArgs
from slime.catalog.estimators import ESTIMATORS
from slime.rollout.generation.scope import RequestScope
from slime.rollout.prompt_groups import Group
from slime.utils.types import Sample, flatten_samples

# Ended before they were done; older than the bound; dropped by a filter; of equal rewards, dropped or not;
# failed or without a reward.
CAUSES = ("aborted", "stale", "filtered", "zero_variance", "failed")
UNITS = ("samples", "tokens", "seconds")


class Waste:
    """Counts the wasted work of one rollout."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, str]] = Counter()

    def discarded(self, cause: str, group: Group, scope: RequestScope) -> None:
        """Count a whole finished group as wasted, with what earlier rollouts generated of it."""
        samples = flatten_samples(group)
        self._add(cause, len(samples), sum(map(num_made, samples)), scope.seconds)

    def restarted(self, cause: str, origin: Group, kept: Group, scope: RequestScope) -> None:
        """Count what is lost when a group starts again from `origin`, or continues from `kept`."""
        before, after = (sum(map(num_made, flatten_samples(group))) for group in (origin, kept))
        lost = max(0, scope.tokens - max(0, after - before))
        if scope.num_sent and (lost or after == before):
            self._add(cause, min(len(flatten_samples(origin)), scope.num_sent), lost, scope.seconds)

    def _add(self, cause: str, samples: int, tokens: int, seconds: float) -> None:
        for unit, value in zip(UNITS, (samples, tokens, seconds), strict=True):
            self._sums[cause, unit] += value  # type: ignore[assignment]  # seconds are floats

    def metrics(self, kept: list[Group]) -> dict[str, Any]:
        """Return all counts, zeros too, and the wasted share of all tokens."""
        metrics: dict[str, Any] = {
            f"rollout/waste/{cause}/{unit}": self._sums[cause, unit] for cause in CAUSES for unit in UNITS
        }
        lost = sum(self._sums[cause, "tokens"] for cause in CAUSES)
        made = sum(num_made(sample) for sample in flatten_samples(kept))
        # Groups of equal rewards may be in the batch.
        useful = max(0, made - self._sums["zero_variance", "in_batch"])
        metrics["rollout/waste/share"] = lost / (lost + useful) if lost else 0.0
        return metrics

    def equal_rewards(self, group: Group, scope: RequestScope) -> None:
        """Count a group that is in the batch but has no advantage, because its rewards are equal."""
        self.discarded("zero_variance", group, scope)
        self._sums["zero_variance", "in_batch"] += sum(map(num_made, flatten_samples(group)))


def num_made(sample: Sample) -> int:
    """Return the number of response tokens that the policy generated."""
    spans = sum(end - start for _, start, end in sample.version_spans)
    return spans or sample.effective_response_length


def teaches_nothing(args: PluginArgs, group: Group) -> bool:
    """Return whether rewards are all equal, and training relies on their differences within the group."""
    row = None if args.use_opd else ESTIMATORS.get(args.advantage_estimator)
    samples = [s for s in flatten_samples(group) if s.reward is not None]
    if row is None or not row.compares_in_groups or len(samples) < 2:
        return False
    first, *others = (sample.get_reward_value(args) for sample in samples)
    return all(other == first for other in others)
