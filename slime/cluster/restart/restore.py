"""Restores a lost trainer: finds machines for its ranks, verifies a saved state and loads it.

Peer copies are states in the shared memory of the machines, which outlives the ranks' processes, so that
a dead rank costs one step. They have the content of a checkpoint on disk and are written by the same code.
Two folders alternate: the previous copy stays complete until all ranks have written the next one. If ranks
run on several machines, each machine also holds its neighbour's copy, so that one machine can be lost.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slime.arguments import Args
from slime.catalog.deadlines import timeout_s
from slime.cluster.checkpoints.save_folder import naming_disk_errors
from slime.cluster.host_check import check_hosts
from slime.cluster.residency import TRAIN, Residency
from slime.cluster.restart.replay import ReplayLog, SafeState, UnreadableState
from slime.cluster.training.train_actor import Memory, TrainActor
from slime.cluster.training.train_group import RankProcesses, TrainGroup
from slime.liveness import phases, waits
from slime.runtime.base import Runtime
from slime.runtime.placement import Slot
from slime.utils.errors import RunStopped
from slime.utils.files.checksums import FileRecord
from slime.utils.files.machine_copies import CopyPlace
from slime.utils.files.step_folders import TRAINER, DamagedCheckpoint, NewerCheckpoint, read_step, step_path
from slime.utils.machine import shm

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_NAMED = 3  # files that a message lists

# These flags concern the checkpoint of --load, which later processes do not load.
OF_THE_FIRST_START = {"finetune": False, "no_load_optim": False, "no_load_rng": False}


@dataclass(frozen=True, slots=True)
class Restorer:
    """Starts new ranks and loads a safe state. `slots`: the places of the first ranks.

    `prepare`: what new ranks need before they train, beyond their state.
    """

    args: Args
    runtime: Runtime
    slots: tuple[Slot, ...]
    processes: RankProcesses
    group: TrainGroup
    residency: Residency
    prepare: Callable[[], None]

    def restore(self, state: SafeState) -> None:
        """Start new ranks and bring all of them to `state`; UnreadableState where it is damaged."""
        self.residency.enter(TRAIN)  # engines make room, as for any step
        self.processes.move(find_slots(self.args, self.runtime, self.slots))
        check_hosts(self.args, self.runtime, None)  # a host may be new
        self.processes.renew(state.args)
        self.load(state, check_readable(state, self.processes))

    def load(self, state: SafeState, source: Path | CopyPlace | None) -> None:
        """Load `source` into new ranks, and what it does not hold of `state`."""
        self.group.layouts = self.processes.reload(source)
        self.prepare()
        ranks = self.group.ranks
        if state.memories:  # equal on all ranks, of which there may be more or fewer now
            ranks.call(TrainActor.remember, state.memories[0])
        for name, value in state.settings.items():
            ranks.call(TrainActor.change_setting, name, value)


class TrainerRelease:
    """Ends the ranks while engines generate (--release-train). `checkpoint`: what the run starts from.

    Nothing is lost: weights, optimizer, schedule and random state are in the checkpoint of the previous
    rollout, which is complete before the processes end; the rest is in `Memory`.
    """

    def __init__(self, restorer: Restorer, checkpoint: Path | None):
        self._restorer, self._args, self._checkpoint = restorer, restorer.args, checkpoint
        self._memories: tuple[Memory, ...] = ()

    def end_processes(self) -> None:
        """End the processes after a push: engines have the weights, and nothing else needs the trainer."""
        self._memories = tuple(self._restorer.group.ranks.call(TrainActor.memory))
        self._restorer.processes.end()

    def restart_processes(self, settings: dict[str, float]) -> None:
        """Start the processes again where they have left. `settings`: changed since the run started."""
        if self._restorer.processes.away:
            with phases.doing("starting the trainer"):
                self._restorer.processes.renew(self._args)
                state = SafeState(self._args, self._checkpoint, -1, self._memories, settings)
                self._restorer.load(state, self._checkpoint)

    def saved(self, rollout_id: int) -> None:
        """Note a complete checkpoint: the next processes load it."""
        assert self._args.save is not None, "the rules ask for --save"
        self._checkpoint = step_path(self._args.save, rollout_id) / TRAINER
        self._args = self._args.replace(**OF_THE_FIRST_START)


class PeerCopies:
    """Writes copies of the trainer's state to shared memory. `prefix`: of the run's shared memory."""

    def __init__(self, args: Args, prefix: str, processes: RankProcesses, replay: ReplayLog):
        self._args, self._processes, self._replay = args.replace(**OF_THE_FIRST_START), processes, replay
        self._every = args.peer_copies
        self._folders = [shm.FOLDER / f"{prefix}-state-{turn}" for turn in ("a", "b")]

    def are_due(self, rollout_id: int) -> bool:
        return (rollout_id + 1) % self._every == 0

    def write(self, rollout_id: int) -> None:
        """Write the copy after the step of this rollout; it counts only when all ranks are done."""
        folder: Path = next(folder for folder in self._folders if folder != self._replay.safe.folder)
        ranks, place = self._processes.actors, self._processes.copy_place(folder)
        memories = tuple(ranks.call(TrainActor.memory))
        self._replay.begin_save(SafeState(self._args, folder, rollout_id, memories))
        files: dict[str, FileRecord] = {}
        with naming_disk_errors("--peer-copies", shm.FOLDER, rollout_id):
            for of_machine in ranks.call(TrainActor.copy_state, place):
                files |= of_machine
        self._replay.commit(rollout_id, files)


def check_readable(state: SafeState, ranks: RankProcesses) -> Path | CopyPlace | None:
    """Return the state as ranks load it; UnreadableState where it is damaged."""
    if state.folder is None:
        return None
    if state.copied is not None:
        place = ranks.copy_place(state.folder)
        damage = ranks.complete_copy(place, state.copied)
        _raise_damage(damage, f"the copy in memory of step {state.rollout_id + 1}")
        return place
    path = state.folder.parent
    try:
        step = read_step(path)
    except (DamagedCheckpoint, NewerCheckpoint) as error:
        raise UnreadableState(str(error)) from error
    _raise_damage(ranks.find_damage(path, step.manifest.files or {}), str(path))
    return state.folder


def _raise_damage(damage: list[str], what: str) -> None:
    if damage:
        more = f" and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
        raise UnreadableState(f"{what} is damaged: {'; '.join(damage[:_NAMED])}{more}")


def find_slots(args: Args, runtime: Runtime, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Find a slot for each rank; with --elastic for as many ranks as the remaining machines can hold.

    Waits for missing machines, and logs what it needs; RunStopped after --timeouts restart-wait.
    """
    limit_s = timeout_s(args, "restart-wait")
    replica = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    shards = args.tensor_model_parallel_size * (args.fsdp_shard_size or 1)
    unit = math.lcm(replica, args.expert_model_parallel_size, shards)
    with waits.waiting("machines for the trainer", owner="driver", deadline_s=limit_s) as wait:
        logged = False
        while True:
            found = [slot for slot in runtime.relocate(slots) if slot is not None]
            if len(found) == len(slots):
                return tuple(found)
            missing = _missing(slots, found)
            # As many ranks as hold whole copies of the model.
            fewer = len(found) // unit * unit if args.elastic else 0
            if fewer:
                logger.warning(
                    "%s. --elastic: training continues on %d rank(s), each with a larger share of the batch.",
                    *(missing, fewer),
                )
                return tuple(replace(slot, index=rank) for rank, slot in enumerate(found[:fewer]))
            left = limit_s - wait.age_s
            if left <= 0:
                raise RunStopped(
                    f"{missing}, also after --timeouts restart-wait={limit_s:g}: start Ray on another "
                    "machine and run this command again, or continue with fewer ranks by --elastic."
                )
            if not logged:
                logger.warning("%s: waiting up to %.0f s for another machine to join Ray.", missing, left)
            logged = True
            time.sleep(min(_POLL_S, left))


def _missing(slots: Sequence[Slot], found: Sequence[Slot]) -> str:
    needs, has = (len({slot.machine for slot in some}) for some in (slots, found))
    return (
        f"the trainer needs {len(slots)} ranks on {needs} machine(s) (--actor-num-nodes, "
        f"--actor-num-gpus-per-node) and has {has} machine(s) for {len(found)}"
    )
