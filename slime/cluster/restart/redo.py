"""What the trainer did since its last safe state, to be done again by the processes that replace it.

A restart is invisible to the rest of the run: rollouts, engines and the loop stay where they are, and new
ranks take the very steps that were lost, on the very batches, with the same versions of weights between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slime.arguments import Args
from slime.cluster.train_actor import Memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SafeState:
    """What new ranks begin from: a folder (None: the initial weights), and what that does not hold.

    `rollout_id`: the last that is in it; -1: none. `settings`: those that were changed by then.
    """

    args: Args
    folder: Path | None
    rollout_id: int
    memories: tuple[Memory, ...] = ()
    settings: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "its initial weights" if self.folder is None else f"its state after step {self.rollout_id + 1}"


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that changed the trainer. `saves`: the rollout whose checkpoint it writes."""

    name: str
    again: Callable[[], object]
    setting: tuple[str, float] | None = None
    saves: int | None = None


class Redo:
    """The driver's list of deeds behind a safe state; `is_on` False: nothing will be done again."""

    def __init__(self, safe: SafeState, is_on: bool = True):
        self.safe, self._is_on = safe, is_on
        self._deeds: list[Deed] = []
        self._marked: tuple[SafeState, int] | None = None  # being written: it covers so many deeds
        self._position: int | None = None  # of the deed that is being done again

    def note(self, deed: Deed) -> None:
        """It is done. What is done again is in the list already."""
        if self._is_on and self._position is None:
            self._deeds.append(deed)

    def begin_save(self, state: SafeState) -> None:
        """A state is being written: what was done until now is in it, once it is committed."""
        covered = len(self._deeds) if self._position is None else self._position
        settings = {**self.safe.settings, **_settings(self._deeds[:covered])}
        state = SafeState(state.args, state.folder, state.rollout_id, state.memories, settings)
        self._marked = state, covered

    def commit(self, rollout_id: int) -> None:
        """The state that was being written after this rollout is safe."""
        if self._marked is not None and self._marked[0].rollout_id == rollout_id:
            (self.safe, covered), self._marked = self._marked, None
            self._deeds = self._deeds[covered:]
        self._deeds = [deed for deed in self._deeds if deed.saves is None or deed.saves > rollout_id]

    def run(self) -> None:
        """All deeds once more, in their order. One of them may commit a state, which shortens the list."""
        self._marked = None
        position = 0
        try:
            while position < len(self._deeds):
                self._position, before = position, len(self._deeds)
                logger.info("the trainer does again: %s", self._deeds[position].name)
                self._deeds[position].again()
                position += 1 - (before - len(self._deeds))
        finally:
            self._position = None


def _settings(deeds: list[Deed]) -> dict[str, float]:
    return dict(deed.setting for deed in deeds if deed.setting is not None)
