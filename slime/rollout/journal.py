"""The outcome of every prompt group: the events a data source reports, and a journal that counts them.

Each group that is handed out (`issued`) comes back once: into the buffer (`returned`), into a training batch
(`consumed`, outcome "trained"), or out of the run with a reason ("filtered", "failed"). The durable journal
(slime.rollout.ledger) implements the same three methods and follows the one that counts.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slime.rollout.prompt_groups import Group

Outcome = Literal["trained", "filtered", "failed"]
_MAX_DROPPED = 10_000  # groups that wait to be taken


class Journal(Protocol):
    """Where a data source reports what happens to groups."""

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None: ...
    def returned(self, groups: Sequence[Group]) -> None: ...
    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Settled:
    """A group that left the run without being trained on, and why."""

    group: Group
    outcome: Outcome
    reason: str | None


class CountingJournal:
    """Keeps totals, and the groups dropped since they were last taken.

    `new` groups came from the dataset, `reissued` ones out of the buffer.
    """

    def __init__(self, counts: dict[str, int] | None = None):
        self.counts: Counter[str] = Counter(counts or {})
        self.follower: Journal | None = None  # receives the same events
        self._dropped: deque[Settled] = deque(maxlen=_MAX_DROPPED)

    def restore(self, counts: dict[str, int] | None) -> None:
        """Continue from the totals of a checkpoint."""
        self.counts = Counter(counts or {})
        self._dropped.clear()

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None:
        self.counts["reissued" if from_buffer else "new"] += len(groups)
        if self.follower is not None:
            self.follower.issued(groups, from_buffer=from_buffer)

    def returned(self, groups: Sequence[Group]) -> None:
        self.counts["returned"] += len(groups)
        if self.follower is not None:
            self.follower.returned(groups)

    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        self.counts[outcome] += len(groups)
        if outcome != "trained":
            self._dropped.extend(Settled(group, outcome, reason) for group in groups)
        if self.follower is not None:
            self.follower.consumed(groups, outcome, reason)

    def drain_dropped(self) -> list[Settled]:
        """Return the groups that were dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    @property
    def in_flight(self) -> int:
        """Return the number of groups without an outcome yet."""
        c = self.counts
        return c["new"] + c["reissued"] - c["returned"] - c["trained"] - c["filtered"] - c["failed"]
