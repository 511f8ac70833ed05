"""Records each turn of an episode in the ledger, so that a killed run continues the episode in that turn.

The record of an unfinished episode is its sample so far; what else the episode needs is in the sample's
metadata. Before a call with effects the record is on the disk, so that no call is made twice after a crash.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from uuid import uuid4

from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import Entry
from slime.utils.types import Sample

_current: ContextVar[EpisodeRecord | None] = ContextVar("slime_episode_record", default=None)


class EpisodeRecord:
    """The record of the episode that the running generate call plays."""

    def __init__(self, ledger: Ledger, origin: Sample) -> None:
        self._ledger, self._origin = ledger, origin

    def restored(self, sample: Sample) -> Sample:
        """Return the sample as the last recorded turn left it; the given one if none is recorded."""
        return self._ledger.unfinished(self._origin) or sample

    async def called(self, call_id: str, sample: Sample | None, *, repeatable: bool) -> None:
        """Record that a call is about to be made; it must not be made before this returns.

        `sample` None: a repeatable call of an episode that needs no record of it.
        """
        value = json.dumps({"id": call_id, "repeatable": repeatable})
        self._ledger.progressed("called", self._origin, value, sample)
        if sample is not None:
            await self._ledger.written()

    async def replied(self, call_id: str, sample: Sample | None, *, wait: bool) -> None:
        """Record the result of a call, with the sample as it is now; `wait` until it is on the disk."""
        self._ledger.progressed("replied", self._origin, json.dumps({"id": call_id}), sample)
        if wait:
            await self._ledger.written()

    def continued(self, call_id: str, how: str) -> None:
        """Record that the episode resumes, with the id of its next call."""
        self._ledger.progressed("continued", self._origin, json.dumps({"id": call_id, "by": how}))


def current() -> EpisodeRecord | None:
    """Return the record of the running generate call; None: its run or rollout keeps none."""
    return _current.get()


def new_episode() -> str:
    """Return a name for an episode; the ids of its calls begin with it."""
    return uuid4().hex[:16]


@contextlib.contextmanager
def entered(ledger: Ledger | None, origin: Entry) -> Iterator[None]:
    """Let the generate call of this entry find its record, if the ledger keeps samples."""
    is_kept = ledger is not None and ledger.keeps and isinstance(origin, Sample)
    before = _current.set(EpisodeRecord(ledger, origin) if is_kept else None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _current.reset(before)
