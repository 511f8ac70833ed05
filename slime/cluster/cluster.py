"""The run as the loop uses it: generates rollouts, trains on them, pushes weights, evaluates, saves, logs.

Between two steps it handles requests from users: pause, save, stop, settings.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from slime.arguments import Args
from slime.catalog.actions import ACTIONS
from slime.cluster.checkpoints.run_ledger import was_evaluated
from slime.cluster.driver_spans import Timeline
from slime.cluster.recording import Recording
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_log import RunLog
from slime.cluster.trainer import Trainer
from slime.cluster.weight_push import WeightPush
from slime.liveness import phases, waits
from slime.record.actions import ASKED, DONE, REFUSED, ActionRow
from slime.runtime.base import Future, Handle, Ready
from slime.utils.files.run_file import read_run
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_MIN_LR_STYLES = ("linear", "cosine")


@dataclass(kw_only=True)
class Cluster:
    """A run whose parts are all ready; `slime.cluster.start.open_cluster` starts it and closes it."""

    args: Args
    run: Run
    schedule: RolloutSchedule
    rollout: Handle[RolloutManager]
    trainer: Trainer
    log: RunLog
    timeline: Timeline
    requests: Requests
    restored: dict[int, Generated]  # rollouts that were complete before a resume, by number
    stopped: str | None = None  # why the loop ended early, on request

    def generate(self, rollout_id: int) -> Generated:
        with self.trainer.make_room(rollout_id):
            return self.collect(rollout_id, self.start_generate(rollout_id))

    def start_generate(self, rollout_id: int) -> Future[Generated]:
        restored = self.restored.pop(rollout_id, None)
        if restored is not None:
            return Ready(restored)
        return self.trainer.guard(self.rollout.call(RolloutManager.generate, rollout_id), rollout_id)

    def collect(self, rollout_id: int, future: Future[Generated]) -> Generated:
        with self.timeline.doing("generating", rollout_id) as wait:
            self.timeline.record_step()
            generated = future.result()
        self.log.log_rollout(rollout_id, generated, wait.age_s)
        return generated

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        self.requests.before_training(self, rollout_id)
        report = self.trainer.train(rollout_id, batch)
        self.rollout.call_control(RolloutManager.note_trained, rollout_id)
        is_saved = self.args.save is not None and self.schedule.save_after(rollout_id)
        if metrics := self.trainer.keep_state(rollout_id, is_saved=is_saved):
            self.log.log(metrics, "rollout", rollout_id)
        peaks = self.trainer.residency.drain_peaks()
        self.log.log_step(rollout_id, report, peaks)
        peak_gib = peaks.get("perf/peak_memory_train_gib")
        self.log.compare_prediction(lambda: self.trainer.peak_bytes(peak_gib), batch)

    def push_weights(self, rollout_id: int) -> None:
        """Push the weights that rollout `rollout_id` and later ones use; no-op if nothing is trained."""
        if self.trainer.weight_push is None:
            return
        metrics = self.trainer.push_weights(max(rollout_id - 1, 0), first=rollout_id == self.schedule.start)
        if metrics:
            self.log.log(metrics, "rollout", rollout_id)
        if rollout_id < self.schedule.num_rollout:
            self.trainer.end_processes(rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        with self.trainer.make_room(rollout_id), self.timeline.doing("evaluating", rollout_id):
            evaluation = self.rollout.call(RolloutManager.evaluate, rollout_id)
            metrics = self.trainer.guard(evaluation, rollout_id).result()
        self.log.log_evaluation(rollout_id, metrics, [dataset.name for dataset in self.args.eval_datasets])
        # Only now: a run killed before its metrics were logged must evaluate again when it resumes.
        self.rollout.call_control(RolloutManager.note_evaluated, rollout_id)

    def evaluate_what_was_missed(self) -> None:
        """Evaluate after the checkpoint's step, where the run was killed between the two."""
        last = self.schedule.start - 1
        if self.run.num_starts == 1 or last < 0 or not self.schedule.eval_after(last):
            return
        if not was_evaluated(self.run, last):
            self.evaluate(last)

    def save(self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None) -> None:
        """Save after `rollout` was trained; a next rollout in flight is part of the checkpoint."""
        seconds = self.trainer.save(rollout_id, rollout, in_flight)
        self.log.log({"perf/save_model_time": seconds}, "rollout", rollout_id)

    def end_step(
        self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None
    ) -> bool:
        """Handle requests that came during the step. True: the run is to end here."""
        self.stopped = self.requests.handle(self, rollout_id, rollout, in_flight)
        self.timeline.end_step(rollout_id, self.trainer.drain_notes())
        if self.stopped is not None or not self.schedule.has_next(rollout_id):
            self.timeline.record_step()
        return self.stopped is not None


class RequestRefused(Exception):
    """Raised for an action that this run cannot do; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """The end of a step, at which requests are handled. `done`: operations that were already done there."""

    cluster: Cluster
    rollout_id: int
    rollout: Generated
    in_flight: Future[Generated] | None
    done: set[str] = field(default_factory=set)


class Requests:
    """Reads requested actions and executes them. `recording` None: there are none."""

    def __init__(self, recording: Handle[Recording] | None):
        self._recording = recording
        self._current: dict[str, float] = {}  # settings that were changed
        self._for_trainer: list[tuple[int, str, float]] = []  # from which rollout on

    def handle(
        self, cluster: Cluster, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None
    ) -> str | None:
        """Do all that was requested since the last step. Returns why the run is to end; None: it is not."""
        end = _StepEnd(cluster, rollout_id, rollout, in_flight)
        paused, stop = self._handle_asked(end, paused=False)
        if stop or not paused:
            return stop
        started = time.monotonic()
        with cluster.timeline.doing(phases.PAUSED, rollout_id):
            while paused and not stop:
                cluster.trainer.check(rollout_id)
                with waits.waiting("the next check for requests"):  # it ends: a paused run does not hang
                    time.sleep(_POLL_S)
                paused, stop = self._handle_asked(end, paused=True)
        cluster.log.leave_out(time.monotonic() - started)
        return stop

    def _asked(self, state: str = ASKED) -> list[ActionRow]:
        recording = self._recording
        return [] if recording is None else recording.call_control(Recording.actions, state).result()

    def _reply(self, row: ActionRow, state: str, rollout_id: int, text: str) -> None:
        assert self._recording is not None, "it is a request to a recorded run"
        self._recording.call_control(Recording.reply, row, state, rollout_id, text).result()

    def _handle_asked(self, end: _StepEnd, *, paused: bool) -> tuple[bool, str | None]:
        """Execute pending requests; return whether the run is paused afterwards, and why it should end."""
        stop = None
        for row in self._asked():
            try:
                reply, state = self._do(end, row), DONE
            except RequestRefused as refusal:
                reply, state = str(refusal), REFUSED
            logger.info("Request by %s after rollout %d: %s: %s", row.who, end.rollout_id, row.name, reply)
            self._reply(row, state, end.rollout_id, reply)
            if state == DONE:
                paused = row.name == "pause" or (paused and row.name != "resume")
                if row.name == "stop":
                    stop = f"stopped after step {end.rollout_id + 1}, as asked by {row.who}"
        return paused, stop

    def before_training(self, cluster: Cluster, rollout_id: int) -> None:
        """Apply settings that changed how this batch was sampled, before the trainer uses it."""
        due = [entry for entry in self._for_trainer if entry[0] <= rollout_id]
        self._for_trainer = [entry for entry in self._for_trainer if entry[0] > rollout_id]
        for _, name, value in due:
            cluster.trainer.change_setting(name, value, rollout_id)

    def restore_settings(self, cluster: Cluster) -> None:
        """Restore settings that were changed before a resume, unless their flags have changed since."""
        record = read_run(cluster.run.run_dir)
        if record is None or not record.earlier:
            return
        changed: dict[str, float] = {}
        for row in self._asked(DONE):
            setting = ACTIONS[row.name].setting if row.name in ACTIONS else None
            if setting and isinstance(row.value, float) and (row.rollout_id or 0) < cluster.schedule.start:
                changed[setting] = row.value
        before, now = record.earlier[-1].settings, record.last.settings
        for setting, value in changed.items():
            if before.get(setting, {}).get("value") == now.get(setting, {}).get("value"):
                logger.info(
                    "--%s is %g: it was changed by a request before the resume.",
                    setting.replace("_", "-"),
                    value,
                )
                self._change(cluster, setting, value, cluster.schedule.start - 1, in_flight=False)

    def _do(self, end: _StepEnd, row: ActionRow) -> str:
        """Do it and return what was done, in a sentence; RequestRefused: why not."""
        cluster, rollout_id, action = end.cluster, end.rollout_id, ACTIONS.get(row.name)
        if action is None or action.wrong_value(row.value):
            raise RequestRefused("this version of slime does not know it, or not with this value")
        if action.setting is not None:
            assert isinstance(row.value, float), "a setting has a value"
            return self._set(end, action.setting, row.value)
        if action.of_engine:
            return self._change_engines(cluster, row)
        if row.name == "evaluate":
            if not cluster.args.eval_datasets:
                raise RequestRefused("the run has nothing to evaluate on: give --eval-prompt-data")
            if not cluster.schedule.eval_after(rollout_id) and "evaluate" not in end.done:
                cluster.evaluate(rollout_id)
            end.done.add("evaluate")
            return f"evaluated after step {rollout_id + 1}"
        if row.name == "checkpoint" and cluster.args.save is None:
            raise RequestRefused("the run keeps no checkpoints: start it with --save")
        if row.name in ("checkpoint", "stop") and cluster.trainer.saver is not None:
            if not cluster.schedule.save_after(rollout_id) and "checkpoint" not in end.done:
                cluster.save(rollout_id, end.rollout, end.in_flight)
            end.done.add("checkpoint")
            return f"saved after step {rollout_id + 1}"
        words = {"pause": "paused", "resume": "resumed", "stop": "ends here; without --save nothing is kept"}
        return words[row.name]

    def _change_engines(self, cluster: Cluster, row: ActionRow) -> str:
        """Let an engine join or leave the run."""
        args, push = cluster.args, cluster.trainer.weight_push
        if args.colocate or args.update_weight_mode == "delta" or args.debug_train_only:
            raise RequestRefused(
                "engines cannot join or leave with --colocate, or if weights are sent as deltas"
            )
        transport = push.transport if isinstance(push, WeightPush) else None
        change = cluster.rollout.call_control(
            RolloutManager.change_engines, row.name, str(row.value), transport
        )
        text, urls = change.result()
        if not urls:
            raise RequestRefused(text)
        if isinstance(push, WeightPush):
            push.know_engines(urls)
        return text

    def _set(self, end: _StepEnd, setting: str, value: float) -> str:
        args = end.cluster.args
        if not end.cluster.trainer.group.ranks.handles:
            raise RequestRefused("nothing is trained in this run")
        if setting == "lr" and args.lr_decay_style in _MIN_LR_STYLES and value < args.min_lr:
            raise RequestRefused(f"it is below --min-lr {args.min_lr:g}, to which the rate decays")
        if setting == "rollout_temperature" and (args.partial_rollout or args.release_train):
            raise RequestRefused("it cannot change with --partial-rollout or --release-train")
        before = self._current.get(setting, getattr(args, setting))
        self._change(end.cluster, setting, value, end.rollout_id, in_flight=end.in_flight is not None)
        old = f"{before:g}" if isinstance(before, (int, float)) else "as --eps-clip"
        return f"--{setting.replace('_', '-')} was {old} and is {value:g} from step {end.rollout_id + 2} on"

    def _change(
        self, cluster: Cluster, setting: str, value: float, rollout_id: int, *, in_flight: bool
    ) -> None:
        self._current[setting] = value
        if setting == "rollout_temperature":
            # On the work lane: after a rollout in flight, which was started with the old one.
            cluster.rollout.call(RolloutManager.change_setting, setting, value)
            self._for_trainer.append((rollout_id + (2 if in_flight else 1), setting, value))
        else:
            cluster.trainer.change_setting(setting, value, rollout_id)
