"""What was generated and taught nothing, by its cause: in samples, tokens and seconds of requests.

Each group is counted once, where it is decided about. Tokens are those that engines answered with, also for
requests that were ended; seconds are those of requests, side by side ones added up. A group that came whole
out of the buffer or the ledger cost nothing here.
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
    """Sums over one rollout."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, str]] = Counter()

    def whole(self, cause: str, group: Group, scope: RequestScope) -> None:
        """A finished group is of no use, as long as it is, also with what earlier rollouts made of it."""
        samples = flatten_samples(group)
        self._add(cause, len(samples), sum(map(num_made, samples)), scope.seconds)

    def begun(self, cause: str, origin: Group, kept: Group, scope: RequestScope) -> None:
        """A group begins again as `origin` was, or goes on with `kept` of what was made since."""
        before, after = (sum(map(num_made, flatten_samples(group))) for group in (origin, kept))
        lost = max(0, scope.tokens - max(0, after - before))
        if scope.num_sent and (lost or after == before):
            self._add(cause, min(len(flatten_samples(origin)), scope.num_sent), lost, scope.seconds)

    def spares(self, group: Group, scope: RequestScope) -> None:
        """A group was filled by those that ended first: the others were ended."""
        lost = scope.tokens - sum(map(num_made, flatten_samples(group)))
        number = scope.num_sent - len(flatten_samples(group))
        if lost > 0 and number > 0:
            self._add("aborted", number, lost, scope.seconds * number / scope.num_sent)

    def _add(self, cause: str, samples: int, tokens: int, seconds: float) -> None:
        for unit, value in zip(UNITS, (samples, tokens, seconds), strict=True):
            self._sums[cause, unit] += value  # type: ignore[assignment]  # seconds are no whole number

    def metrics(self, kept: list[Group]) -> dict[str, Any]:
        """All of it, zeros too, and the share of the tokens that it is."""
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
        """Groups that are in the batch and have no advantage, because their rewards are equal."""
        self.whole("zero_variance", group, scope)
        self._sums["zero_variance", "in_batch"] += sum(map(num_made, flatten_samples(group)))


def num_made(sample: Sample) -> int:
    """Tokens of the response that the policy wrote."""
    spans = sum(end - start for _, start, end in sample.version_spans)
    return spans or sample.effective_response_length


def teaches_nothing(args: PluginArgs, group: Group) -> bool:
    """Whether all rewards are equal where advantages come from comparing them."""
    row = ESTIMATORS.get(args.advantage_estimator)
    samples = [s for s in flatten_samples(group) if s.reward is not None]
    if row is None or not row.compares_in_groups or len(samples) < 2:
        return False
    first, *others = (sample.get_reward_value(args) for sample in samples)
    return all(other == first for other in others)
