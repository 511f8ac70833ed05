"""Records the operations of the trainer since its last safe state, so that new ranks can replay them.

A restart is invisible to the rest of the run: rollouts, engines and the loop keep their state, and new
ranks repeat exactly the lost steps, on the same batches, with the same weight versions between them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from slime.arguments import Args
from slime.cluster.training.train_actor import Memory
from slime.utils import codec
from slime.utils.files.checksums import FileRecord
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30  # of batches in memory


class UnreadableState(Exception):
    """The state that new ranks should load is damaged; the message names file and reason."""


@dataclass(frozen=True, slots=True)
class SafeState:
    """State that new ranks load: a folder (None: the initial weights), and facts that are not in the folder.

    `rollout_id`: the last rollout trained in it; -1: none. `settings`: settings changed by then.
    `copied`: the files of a copy in memory; None: a checkpoint on disk, or the initial weights.
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
class ReplayEntry:
    """One operation that changed the trainer. `saves`: the rollout whose checkpoint it writes."""

    name: str
    again: Callable[[], object]
    setting: tuple[str, float] | None = None
    saves: int | None = None


class KeptBatches:
    """Batches that a restarted trainer may have to train on again: from the ledger, or else from memory.

    `read` asks the ledger for the batch of a rollout; None: the ledger does not keep them.
    """

    def __init__(
        self, read: Callable[[int], RolloutBatch | None] | None = None, most_bytes: int = _MOST_BYTES
    ):
        self._read, self._most_bytes = read, most_bytes
        self._kept: dict[int, bytes] = {}
        self._dropped: int | None = None  # the last one there was no room for: earlier ones are no use either

    def keep(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Keep a batch until the trainer's state after it is safe, or there is no more room."""
        if self._read is not None or rollout_id in self._kept:  # the latter: the step was restarted
            return
        if self._dropped is None:
            with contextlib.suppress(codec.ForeignValue):  # a user's function may put any object into a batch
                self._kept[rollout_id] = codec.encode(codec.with_rows(batch))
        if rollout_id not in self._kept or sum(map(len, self._kept.values())) > self._most_bytes:
            self._kept, self._dropped = {}, rollout_id

    def forget(self, up_to: int) -> None:
        """Drop the batches up to this rollout: the trainer's state after it is safe."""
        if self._dropped is not None and self._dropped <= up_to:
            self._dropped = None
        self._kept = {rollout_id: data for rollout_id, data in self._kept.items() if rollout_id > up_to}

    def get(self, rollout_id: int) -> RolloutBatch | None:
        """Return the batch of a rollout; None where it is not kept any more."""
        if self._read is not None:
            return self._read(rollout_id)
        data = self._kept.get(rollout_id)
        return None if data is None else cast(RolloutBatch, codec.decode(data))


class ReplayLog:
    """The driver's list of operations since a safe state, and the batches they need.

    Safe states in memory follow the last one on disk; if one cannot be read, the previous one is used.
    `is_on` False: nothing is ever replayed. `num_states`: keep at most this many of the newest states, if
    earlier batches are no longer available.
    """

    def __init__(
        self,
        safe: SafeState,
        batches: KeptBatches | None = None,
        is_on: bool = True,
        num_states: int | None = None,
    ):
        self.batches, self.is_on, self._num_states = batches or KeptBatches(), is_on, num_states
        self._states = [(safe, 0)]  # oldest first, each with the number of the first entry after it
        self._entries: dict[int, ReplayEntry] = {}  # by number, in their order
        self._next = 0
        self._writing: tuple[SafeState, int] | None = None  # the state being written, as in `_states`
        self._replaying: int | None = None

    @property
    def safe(self) -> SafeState:
        """The newest state, which new ranks load."""
        return self._states[-1][0]

    @property
    def oldest(self) -> SafeState:
        """The oldest state that may still be loaded: steps before it are never replayed."""
        return self._states[0][0]

    def append(self, entry: ReplayEntry) -> None:
        """Append a completed operation, unless it is being replayed."""
        if self.is_on and self._replaying is None:
            self._entries[self._next] = entry
            self._next += 1

    def begin_save(self, state: SafeState) -> None:
        """Mark that a state is being written; once committed, it covers everything done until now.

        An older state in the same folder is overwritten by it.
        """
        end = self._next if self._replaying is None else self._replaying
        safe, first = self._states[-1]
        done = [entry.setting for number, entry in self._entries.items() if first <= number < end]
        changed = dict(setting for setting in done if setting is not None)
        self._writing = replace(state, settings={**safe.settings, **changed}), end
        others = [pair for pair in self._states if pair[0].folder is None or pair[0].folder != state.folder]
        self._states = others or self._states

    def commit(self, rollout_id: int, copied: Mapping[str, FileRecord] | None = None) -> None:
        """Make the state that was being written after this rollout the safe one.

        `copied`: the files, where it is a copy in memory.
        """
        if self._writing is not None and self._writing[0].rollout_id == rollout_id:
            (state, first), self._writing = self._writing, None
            self._states.append((replace(state, copied=copied), first))
            most = 1 if copied is None else self._num_states or len(self._states)
            self._states = self._states[-most:]
        self._entries = {
            number: entry
            for number, entry in self._entries.items()
            if number >= self._states[0][1] and (entry.saves is None or entry.saves > rollout_id)
        }
        self.batches.forget(self.oldest.rollout_id)

    def fall_back(self) -> SafeState | None:
        """Drop the newest state, which cannot be read, and return the one before it; None: there is none."""
        if len(self._states) == 1:
            return None
        self._states.pop()
        return self.safe

    def run(self) -> None:
        """Replay all entries in their order. One of them may commit a state, which removes others."""
        self._writing = None
        try:
            for number, entry in list(self._entries.items()):
                if number >= self._states[-1][1] and number in self._entries:
                    self._replaying = number
                    logger.info("The restarted trainer replays %s.", entry.name)
                    entry.again()
        finally:
            self._replaying = None
