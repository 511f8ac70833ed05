"""The run as the loop sees it: makes rollouts, trains on them, pushes weights, evaluates, saves, logs."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.arguments import Args
from slime.arguments.groups.micro_batches import micro_batches_of
from slime.cluster.canary.canary import Canary
from slime.cluster.checkpoints.run_ledger import was_evaluated
from slime.cluster.checkpoints.saving import Saver
from slime.cluster.driver_spans import Timeline
from slime.cluster.residency import GENERATE, TRAIN, Residency
from slime.cluster.restart.batches import Batches
from slime.cluster.restart.peer_copies import PeerCopies
from slime.cluster.restart.recovery import Recovery
from slime.cluster.restart.redo import Deed, Redo, SafeState
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_requests import Requests
from slime.cluster.training.rank_notes import RankNotes
from slime.cluster.training.release import OF_THE_FIRST_START, TrainerRelease
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.observability import phases
from slime.observability.advisories import Advisor
from slime.observability.counters import Counters
from slime.observability.tracking import Tracker
from slime.preflight.run_plan import RunPlan
from slime.runtime.base import Future, Handle, Ready, WorkerDied
from slime.step.step_report import StepReport
from slime.utils.errors import RunStopped
from slime.utils.files.step_folders import TRAINER, Manifest, step_path
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


@dataclass
class Cluster:
    """A run whose parts all stand; `slime.cluster.start.open_cluster` makes it and takes it down.

    Whatever needs the trainer goes through `recovery`: a rank that is lost on the way is replaced, and what
    was under way begins again. Rollouts and engines do not notice.
    """

    args: Args
    run: Run
    schedule: RolloutSchedule
    rollout: Handle[RolloutManager]
    trainer: TrainGroup
    residency: Residency
    weight_push: WeightPush | PushToNobody | None  # None: nothing trains
    saver: Saver | None  # None: the run keeps neither checkpoints nor models
    tracker: Tracker
    advisor: Advisor
    recovery: Recovery
    redo: Redo
    batches: Batches
    taken_up: dict[int, Generated]  # by rollout: what was in flight at the checkpoint
    timeline: Timeline
    requests: Requests
    copies: PeerCopies | None = None  # --peer-copies
    canary: Canary | None = None  # None: nothing is compared on fixed texts
    release: TrainerRelease | None = None  # --release-train; None: the trainer's processes stay
    plan: RunPlan | None = None  # what a look before the start predicted
    stopped: str | None = None  # why the loop ended early, on request
    _notes: list[Future[RankNotes]] = field(default_factory=list)  # of ranks that are gone
    _pushes_at_training: int = 0  # what a checkpoint of the trained weights says
    counters: Counters = field(default_factory=Counters)
    _reported: dict[int, set[str]] = field(default_factory=dict)  # by rollout that is not trained yet: names
    _step_times: list[float] = field(default_factory=list)
    _step_started: float = field(default_factory=time.monotonic)

    def generate(self, rollout_id: int) -> Generated:
        with self._generating(rollout_id):
            return self.collect(rollout_id, self.begin_generate(rollout_id))

    def _generating(self, rollout_id: int) -> contextlib.AbstractContextManager[None]:
        self.recovery.run(lambda: self.residency.enter(GENERATE), rollout_id)
        return self.residency.phase(GENERATE)

    def begin_generate(self, rollout_id: int) -> Future[Generated]:
        """A trainer rank that is found to be lost meanwhile is noticed; where that ends the run, at once."""
        taken_up = self.taken_up.pop(rollout_id, None)
        if taken_up is not None:
            return Ready(taken_up)
        return self.recovery.survive(self.rollout.call(RolloutManager.generate, rollout_id), rollout_id)

    def collect(self, rollout_id: int, future: Future[Generated]) -> Generated:
        with self.timeline.doing("generating", rollout_id) as wait:
            self.timeline.tell_step()
            generated = future.result()
        waited = {"perf/train_wait_time": wait.age_s}
        _tell("rollout %d: %s", rollout_id, _headline(generated.metrics, _ROLLOUT_HEADLINE))
        counted = {"rollout/num_samples": generated.num_samples}
        metrics = self.counters.fill(generated.metrics, "rollout")
        self._reported[rollout_id] = {*metrics}
        self._log({**metrics, **waited, **counted}, "rollout", rollout_id)
        return generated

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        self.requests.before_training(self, rollout_id)

        def train() -> StepReport:
            with self.residency.phase(TRAIN), self.timeline.doing("training", rollout_id):
                if self.release is not None and self.release.come_back():
                    self.requests.tell_again(self)
                return self.trainer.train(rollout_id, batch, meanwhile=lambda: self._keep(rollout_id, batch))

        report = self.recovery.run(train, rollout_id)
        self._note_trained(rollout_id, batch)
        if (
            self.release is not None and self.args.record_max_mib
        ):  # its processes end before they can be asked
            told = self.recovery.run(lambda: self.trainer.ranks.call(TrainActor.take_notes), rollout_id)
            self._notes = [Ready(notes) for notes in told]
        self.rollout.call_control(RolloutManager.note_trained, rollout_id)
        self._pushes_at_training = self.weight_push.num_pushes if self.weight_push is not None else 0
        copies = self.copies
        is_kept = self.args.save is not None and self.schedule.save_after(rollout_id)
        if copies is not None and copies.are_due(rollout_id) and not is_kept:
            with self.timeline.doing("copying state", rollout_id) as copying:
                self.recovery.run(lambda: copies.write(rollout_id), rollout_id)
            self.batches.forget(self.redo.oldest.rollout_id)
            self._log({"perf/peer_copy_time": copying.age_s}, "rollout", rollout_id)
        if self.saver is not None:
            saver = self.saver
            self.recovery.run(lambda: saver.finish(wait=False), rollout_id)
        step_time = time.monotonic() - self._step_started
        self._step_started = time.monotonic()
        self._step_times.append(step_time)
        for i, step in enumerate(report.steps):
            _tell("train   %d: %s", rollout_id, _headline(step, _TRAIN_HEADLINE))
            self._log(self.counters.fill(step, "train"), "train", rollout_id * len(report.steps) + i)
        for hint in report.hints:  # of the ranks, whose own logs nobody watches
            logger.warning("train   %d: %s", rollout_id, hint)
        peaks = self.residency.take_peaks()
        if peaks:
            _tell("memory  %d: %s", rollout_id, _headline(peaks, peaks))
        before = self._reported.pop(rollout_id, set())  # when the batch was made: one value for one step
        metrics = {name: value for name, value in report.metrics.items() if name not in before}
        self._log({**metrics, **peaks, "perf/step_time": step_time}, "rollout", rollout_id)
        if len(self._step_times) == _STEPS_MEASURED and self.plan is not None:
            self._report_prediction(self.plan, peaks.get("perf/peak_memory_train_gib"), batch)

    def _keep(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        """Its batch, to do a step again; while the ranks are at it, since nobody else is at work then."""
        if batch is not None and self.recovery.is_on:
            self.batches.keep(rollout_id, batch)

    def _ask_for_notes(self) -> list[Future[RankNotes]]:
        """What ranks tell the record of a step; they make it up while engines generate."""
        notes, self._notes = self._notes, []
        if notes or not self.args.record_max_mib:
            return notes
        with contextlib.suppress(WorkerDied):  # whoever needs them next notices, and restarts them
            return [*self.trainer.ranks.begin(TrainActor.take_notes)]
        return []

    def _note_trained(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        """It can be done again, should the trainer be lost before this step is in a checkpoint."""
        if batch is None or not self.recovery.is_on:
            return
        self.recovery.trained(rollout_id)
        self.redo.note(Deed(f"step {rollout_id + 1}", lambda: self._train_again(rollout_id)))

    def _train_again(self, rollout_id: int) -> None:
        batch = self.batches.get(rollout_id)
        if batch is None:
            raise RunStopped(
                f"the trainer was lost ({self.recovery.cause}) and cannot be restarted: the batch of step "
                f"{rollout_id + 1}, which it has to train on again, is not kept any more; save, or save more "
                "often (--save, --save-interval)."
            )
        self.trainer.train(rollout_id, batch)

    def change_trainer(self, name: str, value: float, rollout_id: int) -> None:
        """A setting of the trainer from its next step on."""

        def change() -> None:
            self.trainer.ranks.call(TrainActor.change_setting, name, value)

        self.recovery.run(change, rollout_id)
        self.redo.note(Deed(f"--{name.replace('_', '-')} {value:g}", change, setting=(name, value)))

    def _report_prediction(self, plan: RunPlan, peak_gib: float | None, batch: RolloutBatch | None) -> None:
        """Log once how the prediction compares with the first steps; the very first one warms up."""
        resident = self.trainer.ranks.call(TrainActor.resident_bytes) if peak_gib is None else []
        held = max(resident, default=0) if peak_gib is None else peak_gib * 2**30
        lengths = statistics.fmean(batch["response_lengths"]) if batch else None
        logger.info("%s", plan.against(statistics.fmean(self._step_times[1:]), held, lengths))

    def push_weights(self, rollout_id: int) -> None:
        """The weights that rollout `rollout_id` and later ones use; no-op in a run that trains nothing."""
        if self.weight_push is None:
            return
        first = rollout_id == self.schedule.start
        doing = phases.starting(phases.FIRST_PUSH) if first else phases.doing("pushing weights")
        push = self.weight_push
        with self.timeline.noted("pushing weights", max(rollout_id - 1, 0)), doing:
            metrics = self.recovery.run(push.push, max(rollout_id - 1, 0))
        self.timeline.pushed(max(rollout_id - 1, 0), push.take_parts())
        number = push.num_pushes
        self.redo.note(Deed(f"weights {number}", lambda: push.push_again(number)))
        if self.canary is not None:
            canary = self.canary
            with self.timeline.doing("the canary", max(rollout_id - 1, 0)):
                metrics |= self.recovery.run(lambda: canary.after_push(number), max(rollout_id - 1, 0))
        if metrics:
            self._log(metrics, "rollout", rollout_id)
        if self.release is not None and rollout_id < self.schedule.num_rollout:
            self.recovery.run(self.release.leave, rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        with self._generating(rollout_id), self.timeline.doing("evaluating", rollout_id):
            evaluation = self.rollout.call(RolloutManager.evaluate, rollout_id)
            metrics = self.recovery.survive(evaluation, rollout_id).result()
        scores = [f"eval/{dataset.name}" for dataset in self.args.eval_datasets]
        _tell("eval    %d: %s", rollout_id, _headline(metrics, scores))
        self._log(self.counters.fill(metrics, "eval"), "eval", rollout_id)
        # Only now: a run that was killed in between would take the evaluation for made, and miss its metrics.
        self.rollout.call_control(RolloutManager.note_evaluated, rollout_id)

    def evaluate_what_was_missed(self) -> None:
        """The evaluation after the checkpoint's step, where the run was killed between the two."""
        last = self.schedule.start - 1
        if self.run.num_starts == 1 or last < 0 or not self.schedule.eval_after(last):
            return
        if not was_evaluated(self.run, last):
            self.evaluate(last)

    def save(self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None) -> None:
        """Save after `rollout` was trained; the next one is part of a checkpoint where it is in flight."""
        assert self.saver is not None, "the schedule saves only with --save or --save-hf"
        saver, kept = self.saver, micro_batches_of(vars(self.args))
        manifest = Manifest(
            rollout_id,
            self.run.run_id,
            self._pushes_at_training,
            micro_batches=kept,
            inputs=self.run.inputs,
        )

        def save(*, wait: bool) -> float:
            self._begin_save(rollout_id)
            return saver.save(manifest, rollout.cursor, in_flight, wait=wait)

        with self.timeline.doing("saving", rollout_id):
            seconds = self.recovery.run(lambda: save(wait=not self.args.async_save), rollout_id)
        if saver.is_writing:
            name = f"the checkpoint of step {rollout_id + 1}"
            self.redo.note(Deed(name, lambda: save(wait=True), saves=rollout_id))
        if self.release is not None:
            self.release.saved(rollout_id)
        self._log({"perf/save_model_time": seconds}, "rollout", rollout_id)

    def _begin_save(self, rollout_id: int) -> None:
        """Once it is complete, a trainer that is lost begins from it; without its optimizer none could."""
        if self.recovery.is_on and self.args.save is not None and not self.args.no_save_optim:
            memories = tuple(self.trainer.ranks.call(TrainActor.memory))
            args = self.args.replace(**OF_THE_FIRST_START)
            folder = step_path(self.args.save, rollout_id) / TRAINER
            self.redo.begin_save(SafeState(args, folder, rollout_id, memories))

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds as part of a step: the run was paused."""
        self._step_started += seconds

    def end_step(
        self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None
    ) -> bool:
        """Between two steps: does what was asked of the run meanwhile. True: it is to end here."""
        self.stopped = self.requests.take(self, rollout_id, rollout, in_flight)
        self.timeline.end_step(rollout_id, self._ask_for_notes())
        if self.stopped is not None or not self.schedule.has_next(rollout_id):
            self.timeline.tell_step()
        return self.stopped is not None

    def _log(self, metrics: dict[str, Any], axis: str, step: int) -> None:
        self.tracker.log(metrics, f"{axis}/step", step)
        for advice in self.advisor.observe(metrics, step):
            logger.warning("advice: %s", advice, extra={"advisory": advice})


_STEPS_MEASURED = 3
_ROLLOUT_HEADLINE = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "perf/rollout_time",
)
_TRAIN_HEADLINE = (
    "train/loss",
    "train/critic-value_loss",
    "train/grad_norm",
    "train/entropy_loss",
    "train/train_rollout_logprob_abs_diff",
)


def _tell(words: str, *values: object) -> None:
    """A line for the log alone: whoever shows a run has its metrics."""
    logger.info(words, *values, extra={"shown_elsewhere": True})


def _headline(metrics: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name.partition('/')[2]} {metrics[name]:.4g}" for name in names if name in metrics)
