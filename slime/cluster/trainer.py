"""The trainer as the loop uses it; it hides lost ranks, released processes and peer copies."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from functools import partial

from slime.arguments import Args
from slime.cluster.canary.canary import Canary
from slime.cluster.checkpoints.saving import Saver
from slime.cluster.closing import Closing
from slime.cluster.driver_spans import Timeline
from slime.cluster.residency import GENERATE, TRAIN, Residency
from slime.cluster.restart.recovery import GuardedFuture, Recovery, headline
from slime.cluster.restart.replay import ReplayEntry, ReplayLog, SafeState
from slime.cluster.restart.restore import OF_THE_FIRST_START, PeerCopies, TrainerRelease
from slime.cluster.rollout_manager import Generated
from slime.cluster.training.train_actor import RankNotes, TrainActor
from slime.cluster.training.train_group import TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.liveness import phases
from slime.runtime.base import Future, R, gather
from slime.step.step_report import StepReport
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.files.step_folders import TRAINER, Manifest, step_path
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 120.0  # overdue is a failure of the run: generous


@dataclass(kw_only=True)
class Trainer:
    """Trains, pushes weights and saves. An operation that a lost rank interrupts is retried with new ranks.

    `rollout_id` names the step at which a loss is reported.
    """

    args: Args
    run: Run
    group: TrainGroup
    residency: Residency
    timeline: Timeline
    recovery: Recovery
    replay: ReplayLog
    weight_push: WeightPush | PushToNobody | None  # None: nothing trains
    saver: Saver | None  # None: the run keeps neither checkpoints nor models
    copies: PeerCopies | None = None  # --peer-copies
    release: TrainerRelease | None = None  # --release-train; None: the trainer's processes stay
    canary: Canary | None = None  # None: engines and trainer are not compared on fixed texts
    _notes: list[Future[RankNotes]] = field(default_factory=list)  # on the last step
    _changed: dict[str, float] = field(default_factory=dict)  # settings, since the run started
    _has_trained: bool = False  # since the last push: the weights are not those of the engines
    _pushes_at_training: int = 0  # the number of pushes before the last step, which its checkpoint records

    # -- during generation

    def make_room(self, rollout_id: int) -> contextlib.AbstractContextManager[None]:
        """Give the device to the engines while the returned context is open."""
        self.recovery.run(rollout_id, self.residency.enter, GENERATE)
        return self.residency.phase(GENERATE)

    def guard(self, future: Future[R], rollout_id: int) -> Future[R]:
        """Return a future of the rollout side that a lost rank does not end."""
        return GuardedFuture(future, self.recovery, rollout_id, partial(self._serve_late_engine, rollout_id))

    def _serve_late_engine(self, rollout_id: int) -> None:
        """Write the weights if an engine has restarted after a live push and waits for them."""
        push = self.weight_push
        if push is None or not push.wants_files(changed=self._has_trained):
            return
        with self.timeline.noted("writing weights for a restarted engine", rollout_id):
            self.recovery.run(rollout_id, push.write_files, changed=self._has_trained)
        if self._has_trained:
            self._note_push(push.num_pushes)

    def _note_push(self, number: int) -> None:
        assert self.weight_push is not None, "something was pushed"
        self.replay.append(ReplayEntry(f"weights {number}", partial(self.weight_push.note_pushed, number)))
        self._has_trained = False

    def check(self, rollout_id: int) -> None:
        """Notice a rank that was lost while nobody waits for one."""
        self.recovery.check(rollout_id)

    # -- a step

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> StepReport:
        self._has_trained = True
        report = self.recovery.run(rollout_id, self._train, rollout_id, batch)
        if batch is not None and self.recovery.is_on:
            self.recovery.note_trained(rollout_id)
            again = partial(self._train_again, rollout_id)
            self.replay.append(ReplayEntry(f"step {rollout_id + 1}", again))
        if self.args.record_max_mib:
            self._notes = self.group.ranks.begin(TrainActor.drain_notes)
        self._pushes_at_training = self.weight_push.num_pushes if self.weight_push is not None else 0
        return report

    def _train(self, rollout_id: int, batch: RolloutBatch | None) -> StepReport:
        with self.residency.phase(TRAIN), self.timeline.doing("training", rollout_id):
            if self.release is not None:
                self.release.restart_processes(self._changed)
            if batch is not None and self.recovery.is_on:
                self.replay.batches.keep(rollout_id, batch)
            return self.group.train(rollout_id, batch)

    def _train_again(self, rollout_id: int) -> None:
        batch = self.replay.batches.get(rollout_id)
        if batch is None:
            raise RunStopped(
                f"the trainer was lost ({self.recovery.cause}) and cannot be restarted: the batch of step "
                f"{rollout_id + 1}, which it has to train on again, is no longer kept; save, or save more "
                "often (--save, --save-interval)."
            )
        self.group.train(rollout_id, batch)

    def keep_state(self, rollout_id: int, *, is_saved: bool) -> dict[str, float]:
        """Write a peer copy where one is due, and complete a checkpoint that ranks have written meanwhile.

        `is_saved`: a checkpoint of this step follows, which makes a copy needless. Returns metrics.
        """
        metrics = {}
        if self.copies is not None and self.copies.are_due(rollout_id) and not is_saved:
            with self.timeline.doing("copying state", rollout_id) as copying:
                self.recovery.run(rollout_id, self.copies.write, rollout_id)
            metrics["perf/peer_copy_time"] = copying.age_s
        if self.saver is not None:
            self.recovery.run(rollout_id, self.saver.finish, wait=False)
        return metrics

    def change_setting(self, name: str, value: float, rollout_id: int) -> None:
        """Change a setting of the trainer from its next step on."""
        change = partial(self.group.ranks.call, TrainActor.change_setting, name, value)
        self.recovery.run(rollout_id, change)
        self._changed[name] = value
        self.replay.append(
            ReplayEntry(f"--{name.replace('_', '-')} {value:g}", change, setting=(name, value))
        )

    def drain_notes(self) -> list[Future[RankNotes]]:
        """Return what the ranks will report about the last step."""
        notes, self._notes = self._notes, []
        return notes

    def peak_bytes(self, peak_gib: float | None) -> float:
        """Return the most memory that a rank has held. `peak_gib`: of its device; None: it has none."""
        if peak_gib is not None:
            return peak_gib * 2**30
        return max(self.group.ranks.call(TrainActor.resident_bytes), default=0)

    # -- weights

    def push_weights(self, rollout_id: int, *, first: bool) -> dict[str, float]:
        """Push the weights of the last step to the engines, and return metrics."""
        push = self.weight_push
        assert push is not None, "a run that trains nothing has nothing to push"
        doing = phases.starting(phases.FIRST_PUSH) if first else phases.doing("pushing weights")
        with self.timeline.noted("pushing weights", rollout_id), doing:
            metrics = self.recovery.run(rollout_id, push.push)
        self.timeline.add(push.drain_spans(rollout_id))
        self._note_push(push.num_pushes)
        if self.canary is not None:
            with self.timeline.doing("the canary", rollout_id):
                metrics |= self.recovery.run(rollout_id, self.canary.after_push, push.num_pushes)
        return metrics

    def end_processes(self, rollout_id: int) -> None:
        """End the trainer's processes until the next step (--release-train); otherwise a no-op."""
        if self.release is not None:
            self.recovery.run(rollout_id, self.release.end_processes)

    # -- checkpoints

    def save(self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None) -> float:
        """Save after `rollout` was trained, and return the seconds that it took."""
        saver = self.saver
        assert saver is not None, "the schedule saves only with --save or --save-hf"
        wait = not self.args.async_save
        with self.timeline.doing("saving", rollout_id):
            seconds = self.recovery.run(rollout_id, self._save, rollout_id, rollout, in_flight, wait)
        if saver.staged is not None:
            again = partial(self._save, rollout_id, rollout, in_flight, True)
            name = f"the checkpoint of step {rollout_id + 1}"
            self.replay.append(ReplayEntry(name, again, saves=rollout_id))
        if self.release is not None:
            self.release.saved(rollout_id)
        return seconds

    def _save(
        self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None, wait: bool
    ) -> float:
        assert self.saver is not None, "the schedule saves only with --save or --save-hf"
        self.residency.enter(TRAIN)
        # Without its optimizer no trainer could restart from it.
        if self.recovery.is_on and self.args.save is not None and not self.args.no_save_optim:
            memories = tuple(self.group.ranks.call(TrainActor.memory))
            folder = step_path(self.args.save, rollout_id) / TRAINER
            args = self.args.replace(**OF_THE_FIRST_START)
            self.replay.begin_save(SafeState(args, folder, rollout_id, memories))
        manifest = Manifest(
            rollout_id,
            self.run.run_id,
            self._pushes_at_training,
            inputs=self.run.inputs,
        )
        return self.saver.save(manifest, rollout.cursor, in_flight, wait=wait)

    # -- the end

    def finish(self, last_rollout_id: int) -> None:
        """End a run that did not fail: complete the last checkpoint, then close the ranks in order."""
        with Closing() as closing:
            closing.add(self._close)
            if self.saver is not None:
                closing.add(partial(self.recovery.run, last_rollout_id, self.saver.finish, wait=True))

    def _close(self) -> None:
        """Close the ranks. All is done and saved: a rank that is lost now costs nothing."""
        try:
            gather(self.group.ranks.begin(TrainActor.close), _CLOSE_DEADLINE_S)
        except WorkerDied as error:
            if not self.recovery.is_on:
                raise
            logger.warning(
                "A trainer rank was lost while the run ended (%s); no result is missing.", headline(error)
            )
