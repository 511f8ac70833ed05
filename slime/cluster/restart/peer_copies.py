"""Copies of the trainer's state in host memory that outlives its processes: a dead rank costs one step.

They are checkpoints in the shared memory of machines, of the same content and by the same code as those on
disk. Two places take turns: the copy before stays whole until all ranks have written the next. With ranks
on several machines, each also holds what the one before it wrote, so that one of them can be lost.
"""

from __future__ import annotations

from pathlib import Path

from slime.arguments import Args
from slime.cluster.checkpoints.save_folder import naming_disk_errors
from slime.cluster.restart.redo import Redo, SafeState
from slime.cluster.training.release import OF_THE_FIRST_START
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import RankProcesses
from slime.utils.files.checksums import FileRecord
from slime.utils.machine import shm


class PeerCopies:
    """`prefix`: of the run's shared memory, which goes with the run however it ends."""

    def __init__(self, args: Args, prefix: str, processes: RankProcesses, redo: Redo):
        self._args, self._processes, self._redo = args.replace(**OF_THE_FIRST_START), processes, redo
        self._every = args.peer_copies
        self._places = [shm.FOLDER / f"{prefix}-state-{turn}" for turn in ("a", "b")]

    def are_due(self, rollout_id: int) -> bool:
        return (rollout_id + 1) % self._every == 0

    def write(self, rollout_id: int) -> None:
        """Writes the copy after the step of this rollout; it counts only when all ranks are done."""
        folder: Path = next(place for place in self._places if place != self._redo.safe.folder)
        ranks, place = self._processes.actors, self._processes.copy_place(folder)
        memories = tuple(ranks.call(TrainActor.memory))
        self._redo.begin_save(SafeState(self._args, folder, rollout_id, memories))
        files: dict[str, FileRecord] = {}
        with naming_disk_errors("--peer-copies", shm.FOLDER, rollout_id):
            for of_machine in ranks.call(TrainActor.copy_state, place):
                files |= of_machine
        self._redo.commit(rollout_id, files)
