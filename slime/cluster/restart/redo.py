"""What the trainer did since its last safe state, to be done again by the processes that replace it.

A restart is invisible to the rest of the run: rollouts, engines and the loop stay where they are, and new
ranks take the very steps that were lost, on the very batches, with the same versions of weights between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime.arguments import Args
from slime.cluster.training.train_actor import Memory
from slime.utils.files.checksums import FileRecord

logger = logging.getLogger(__name__)


class UnreadableState(Exception):
    """What new ranks were to begin from is not what was written; the message names file and reason."""


@dataclass(frozen=True, slots=True)
class SafeState:
    """What new ranks begin from: a folder (None: the initial weights), and what that does not hold.

    `rollout_id`: the last that is in it; -1: none. `settings`: those that were changed by then. `copied`: the
    files of a copy in memory; None: it is a checkpoint on disk, or the initial weights.
    """

    args: Args
    folder: Path | None
    rollout_id: int
    memories: tuple[Memory, ...] = ()
    settings: dict[str, float] = field(default_factory=dict)
    copied: Mapping[str, FileRecord] | None = None

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
    """The driver's list of deeds behind a safe state; `is_on` False: nothing will be done again.

    States in memory stand behind each other, and all behind the last one on disk: where one cannot be read,
    the one before it is there. `num_states`: so many of the newest at most, where earlier batches are gone.
    """

    def __init__(self, safe: SafeState, is_on: bool = True, num_states: int | None = None):
        self._is_on, self._num_states = is_on, num_states
        self._states = [(safe, 0)]  # from the oldest on, with the number of deeds that each covers
        self._deeds: list[Deed] = []
        self._marked: tuple[SafeState, int] | None = None  # being written: it covers so many deeds
        self._position: int | None = None  # of the deed that is being done again

    @property
    def safe(self) -> SafeState:
        """What new ranks begin from."""
        return self._states[-1][0]

    @property
    def oldest(self) -> SafeState:
        """What they begin from at worst: steps until then are never taken again."""
        return self._states[0][0]

    def note(self, deed: Deed) -> None:
        """It is done. What is done again is in the list already."""
        if self._is_on and self._position is None:
            self._deeds.append(deed)

    def begin_save(self, state: SafeState) -> None:
        """A state is being written: what was done until now is in it, once it is committed.

        What lay in the same folder is gone by that.
        """
        covered = len(self._deeds) if self._position is None else self._position
        safe, done = self._states[-1]
        settings = {**safe.settings, **_settings(self._deeds[done:covered])}
        self._marked = replace(state, settings=settings), covered
        others = [pair for pair in self._states if pair[0].folder is None or pair[0].folder != state.folder]
        self._states = others or self._states

    def commit(self, rollout_id: int, copied: Mapping[str, FileRecord] | None = None) -> None:
        """The state that was being written after this rollout is safe; `copied`: it is a copy in memory."""
        if self._marked is not None and self._marked[0].rollout_id == rollout_id:
            (state, covered), self._marked = self._marked, None
            self._states.append((replace(state, copied=copied), covered))
            if copied is None:
                self._forget_before(len(self._states) - 1)
            elif self._num_states is not None:
                self._forget_before(max(0, len(self._states) - self._num_states))
        written = [i for i, deed in enumerate(self._deeds) if deed.saves is not None]
        for i in reversed([i for i in written if (self._deeds[i].saves or 0) <= rollout_id]):
            del self._deeds[i]
            self._states = [(state, covered - (i < covered)) for state, covered in self._states]

    def _forget_before(self, number: int) -> None:
        """States before this one are not needed any more, nor what was done before it."""
        done = self._states[number][1]
        self._deeds = self._deeds[done:]
        self._states = [(state, covered - done) for state, covered in self._states[number:]]

    def fall_back(self) -> SafeState | None:
        """The newest state cannot be read; returns the one before it. None: there is none."""
        if len(self._states) == 1:
            return None
        self._states.pop()
        return self.safe

    def run(self) -> None:
        """All deeds once more, in their order. One of them may commit a state, which shortens the list."""
        self._marked = None
        position = self._states[-1][1]
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
