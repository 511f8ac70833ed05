"""Copies of the trainer's state in host memory that outlives its processes: a dead rank costs one step.

They are checkpoints in the shared memory of the machine, of the same content and by the same code as those on
disk. Two places take turns: the copy before stays whole until all ranks have written the next.
"""

from __future__ import annotations

from pathlib import Path

from slime.arguments import Args
from slime.cluster.release import OF_THE_FIRST_START
from slime.cluster.restart.redo import Redo, SafeState
from slime.cluster.train_actor import TrainActor
from slime.cluster.train_group import Ranks
from slime.utils import shm


class PeerCopies:
    """`prefix`: of the run's shared memory, which goes with the run however it ends."""

    def __init__(self, args: Args, prefix: str, ranks: Ranks[TrainActor], redo: Redo):
        self._args, self._ranks, self._redo = args.replace(**OF_THE_FIRST_START), ranks, redo
        self._every = args.peer_copies
        self._places = [shm.FOLDER / f"{prefix}-state-{turn}" for turn in ("a", "b")]

    def are_due(self, rollout_id: int) -> bool:
        return (rollout_id + 1) % self._every == 0

    def write(self, rollout_id: int) -> None:
        """After the step of this rollout; only when all ranks are done the copy counts."""
        folder: Path = next(place for place in self._places if place != self._redo.safe.folder)
        memories = tuple(self._ranks.call(TrainActor.memory))
        self._redo.begin_save(SafeState(self._args, folder, rollout_id, memories))
        self._ranks.call(TrainActor.copy_state, folder)
        self._redo.commit(rollout_id)
