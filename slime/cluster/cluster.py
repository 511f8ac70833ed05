"""The run as the loop sees it: starts the stages, moves the device
between them, pushes weights, saves, logs.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from slime.arguments import Args, explain_batch
from slime.catalog.transports import TRANSPORTS
from slime.cluster.checkpoint import (
    ROLLOUT,
    StagedCheckpoint,
    discard_staged,
    resolve_load,
    rollout_state,
    stage_checkpoint,
)
from slime.cluster.in_flight import read_in_flight, tell_differences, write_in_flight
from slime.cluster.model_checks import check_models
from slime.cluster.residency import GENERATE, TRAIN, Phase, Residency
from slime.cluster.rollout_manager import Generated, RolloutFacts
from slime.cluster.run import close_run, open_run
from slime.cluster.save_folder import naming_disk_errors, open_save_folder, prepare_folder
from slime.cluster.schedule import Schedule
from slime.cluster.serving.served_model import trains_on_every_gpu
from slime.cluster.stages import NoTrainer, RolloutStage
from slime.cluster.train_group import TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.observability.logging_utils import configure_logger
from slime.observability.tracking import Tracker
from slime.plugins import check_plugins
from slime.rollout.prompt_formats import check_prompt_files
from slime.runtime import create_runtime
from slime.runtime.base import Future, Ready, gather, in_background
from slime.runtime.janitor import Janitor
from slime.runtime.placement import Placement, plan_placement
from slime.utils import shm, waits
from slime.utils.accelerator import device_count, has_bfloat16
from slime.utils.folder_lock import FolderLock
from slime.utils.plain_files import save_plain
from slime.utils.step_folders import Manifest, StepFolder, step_path
from slime.weight_sync import Site, choose_adapter_transport, choose_transport

logger = logging.getLogger(__name__)


class Cluster:
    """A context: whatever ends the block, no process, port or shared memory is left."""

    def __init__(self, args: Args):
        check_plugins(args)
        check_models(args)
        check_prompt_files(args)
        configure_logger()
        self._args = args
        logger.info("%s", explain_batch(args))
        logger.info("precision: %s (%s)", args.dtype, args.sources["dtype"])
        with contextlib.ExitStack() as stack:
            if args.save is not None:
                stack.callback(open_save_folder(args).release)
            self._checkpoint: StepFolder | None = resolve_load(args.load, args.save, args.ckpt_step)
            run_dir = Path(args.run_dir)
            prepare_folder("--run-dir", run_dir)
            stack.callback(FolderLock(run_dir, "--run-dir").release)
            self._run = open_run(args, self._checkpoint)
            stack.push(lambda kind, error, trace: close_run(self._run, error))
            self._tracker = Tracker(args, self._run.run_dir)
            self._runtime = create_runtime(args, self._run.run_dir, self._run.shm_prefix)
            self._folders = stack.pop_all()  # given back last
        self._placement = Placement((), ())  # filled at the start
        self._janitor = Janitor(shm.FOLDER, self._run.shm_prefix)
        self._rollout: RolloutStage | None = None
        self._trainer: TrainGroup | NoTrainer = NoTrainer()
        self._push: WeightPush | PushToNobody | None = None  # None: nothing trains
        self._checkpoint_bytes = 0
        self._taken_up: dict[int, Generated] = {}  # by rollout: what was in flight at the checkpoint
        self._staged: StagedCheckpoint | None = None  # written by the ranks, not yet complete
        self._step_started = time.monotonic()

    # ---- start and end -------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, _raise_interrupt
            )  # a polite end closes everything in order, like Ctrl-C
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        steps: list[Callable[[], object]] = []
        if kind is None:
            steps += [lambda: self._finish_save(wait=True), self._trainer.close]
        elif self._staged is not None:
            logger.warning(
                "the checkpoint of rollout %d was not complete when the run ended", self._staged.rollout_id
            )
        if self._rollout is not None:
            steps.append(self._rollout.close)
        steps += [
            self._runtime.close,
            lambda: shm.unlink_prefix(self._run.shm_prefix),
            self._janitor.dismiss,
            self._tracker.finish,
        ]
        try:
            _end_in_order(steps, error)
        except Exception as failure:
            error = failure
            raise
        finally:
            self._folders.__exit__(type(error) if error is not None else None, error, None)

    def start(self, *, overlapped: bool = False) -> Schedule:
        """Engines and trainer start side by side; returns the ids that this run goes through.

        `overlapped`: the loop has a rollout in flight while it trains, and goes
        on with the one that a checkpoint holds.
        """
        args = self._args
        plan = plan_placement(args, min(device_count(), args.num_gpus_per_node), self._runtime.num_machines)
        self._placement = self._runtime.claim(plan)
        self._run = replace(self._run, host=self._placement.host)
        self._rollout = RolloutStage(args, self._run, self._runtime, self._placement)
        if self._placement.trainer:
            self._trainer = TrainGroup(args, self._run, self._runtime, self._placement.trainer)
        self._residency = Residency(args, self._rollout, self._trainer)
        self._verify_checkpoint()  # while engines load
        resumed = self._checkpoint
        fresh = resumed is None or args.finetune
        start_id = args.start_rollout_id if args.start_rollout_id is not None else 0
        if not fresh:
            start_id = resumed.manifest.rollout_id + 1
            logger.info("resuming after rollout %d from %s", resumed.manifest.rollout_id, resumed.path)
        facts = self._start_stages(start_id, None if fresh else self._resumed_state(resumed, overlapped))
        if self._placement.trainer:
            self._open_push(facts, 0 if fresh else resumed.manifest.num_pushes)
        return Schedule(args, start_id, facts.num_rollout, facts.num_rollout_per_epoch)

    def _resumed_state(self, checkpoint: StepFolder, overlapped: bool) -> dict[str, Any] | None:
        """Of the data source, where the loop goes on: behind the batch in flight, if it takes that up."""
        batch = read_in_flight(checkpoint)
        tell_differences(self._args, checkpoint, batch, overlapped=overlapped)
        if batch is None or not overlapped:
            return rollout_state(checkpoint)
        self._taken_up[checkpoint.manifest.rollout_id + 1] = batch
        return batch.cursor

    def _verify_checkpoint(self) -> None:
        """Every file against its checksum. Where one differs it is
        named, and the checkpoint before is taken.
        """
        if self._checkpoint is None or self._args.no_load_verify:
            return
        if self._checkpoint.manifest.files is None:
            logger.warning(
                "%s has no checksums (an older slime wrote it): loaded as it is", self._checkpoint.path
            )
        started = time.monotonic()
        self._checkpoint = resolve_load(
            self._args.load,
            self._args.save,
            self._args.ckpt_step,
            damage_of=lambda step: self._trainer.find_damage(step.path, step.manifest.files or {}),
            latest=self._checkpoint.manifest.rollout_id,
        )
        logger.info("%s is what was written (%.1f s)", self._checkpoint.path, time.monotonic() - started)

    def _start_stages(self, start_id: int, rollout_state: dict[str, Any] | None) -> RolloutFacts:
        """Side by side; the first failure ends the wait. On a shared
        device the engines size their memory first.
        """
        trainer_folder = self._checkpoint.trainer if self._checkpoint is not None else None
        rollout = self._rollout.begin_start(start_id, rollout_state)
        with waits.telling(lambda: f"starting: {self._describe_start(rollout.done())}"):
            if self._args.colocate:
                gather([rollout])
                self._residency.make_room()
            trainer = in_background(lambda: self._trainer.start(trainer_folder), "trainer-start")
            return gather([rollout, trainer])[0]

    def _describe_start(self, rollout_is_up: bool) -> str:
        engines = len(self._placement.engines)
        return f"{self._trainer.describe_start()}, {engines} engine(s) {'serve' if rollout_is_up else 'are not up yet'}"

    def _open_push(self, facts: RolloutFacts, num_done: int) -> None:
        args = self._args
        if not self._placement.engines:
            self._push = PushToNobody(self._trainer, num_done)
            return
        site = Site(device_count() > 0, args.colocate, trains_on_every_gpu(args, self._placement))
        if args.lora_sync == "adapter":
            transport = choose_adapter_transport(facts.transports)
        else:
            transport = choose_transport(
                args.update_weight_transport, facts.transports, site, args.update_weight_mode
            )
        logger.info("weights travel by %s", transport)
        self._trainer.open_sender(transport, facts.engine_urls)
        stages = (self._trainer, self._rollout, self._residency)
        self._push = WeightPush(
            *stages, self._run.pushes_as, self._wire_dtype(), num_done, live=TRANSPORTS[transport].live
        )

    def _wire_dtype(self) -> str | None:
        """Engines get the precision that the trainer computes in; None: that of the master weights."""
        dtype = self._args.dtype
        return "bfloat16" if dtype == "bfloat16" or (dtype == "auto" and has_bfloat16()) else None

    # ---- one step ------------------------------------------------------------------------------------------

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        return self._residency.phase(phase)

    def generate(self, rollout_id: int) -> Generated:
        with self.phase(GENERATE):
            return self.collect(rollout_id, self.begin_generate(rollout_id))

    def begin_generate(self, rollout_id: int) -> Future:
        batch = self._taken_up.pop(rollout_id, None)
        return self._rollout.begin_generate(rollout_id) if batch is None else Ready(batch)

    def collect(self, rollout_id: int, future: Future) -> Generated:
        started = time.monotonic()
        generated: Generated = future.result()
        waited = {"perf/train_wait_time": time.monotonic() - started}
        logger.info("rollout %d: %s", rollout_id, _headline(generated.metrics, _ROLLOUT_HEADLINE))
        self._log(
            {**generated.metrics, **waited, "rollout/num_samples": generated.num_samples},
            "rollout",
            rollout_id,
        )
        return generated

    def train(self, rollout_id: int, generated: Generated) -> None:
        with self.phase(TRAIN):
            report = self._trainer.train(rollout_id, generated.batch)
        self._finish_save(wait=False)
        step_time = time.monotonic() - self._step_started
        self._step_started = time.monotonic()
        for i, step in enumerate(report.steps):
            logger.info("train   %d: %s", rollout_id, _headline(step, _TRAIN_HEADLINE))
            self._log(step, "train", rollout_id * len(report.steps) + i)
        for hint in report.hints:  # of the ranks, whose own logs nobody watches
            logger.warning("train   %d: %s", rollout_id, hint)
        peaks = self._residency.take_peaks()
        if peaks:
            logger.info("memory  %d: %s", rollout_id, _headline(peaks, peaks))
        self._log({**report.metrics, **peaks, "perf/step_time": step_time}, "rollout", rollout_id)

    def push_weights(self, rollout_id: int) -> None:
        """The weights that rollout `rollout_id` and later ones use; no-op in a run that trains nothing."""
        metrics = self._push.push() if self._push is not None else {}
        if metrics:
            self._log(metrics, "rollout", rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        with self.phase(GENERATE):
            metrics = self._rollout.evaluate(rollout_id)
        scores = [f"eval/{dataset.name}" for dataset in self._args.eval_datasets]
        logger.info("eval    %d: %s", rollout_id, _headline(metrics, scores))
        self._log(metrics, "eval", rollout_id)

    def save(self, rollout_id: int, generated: Generated, in_flight: Future | None = None) -> None:
        """One transaction: the cursor of the batch that was trained, and with
        it the next batch where one is in flight.

        The trainer's part is written first, while that batch is being made.
        """
        started = time.monotonic()
        self._finish_save(wait=True)
        with self._naming_disk_errors(rollout_id):
            manifest = Manifest(rollout_id, self._run.run_id, self._push.num_pushes if self._push else 0)
            self._staged = stage_checkpoint(
                self._args.save, manifest, self._trainer.save, self._checkpoint_bytes
            )
            save_plain(generated.cursor, self._staged.staging / ROLLOUT)
            waiting = time.monotonic()
            write_in_flight(self._staged.staging, rollout_id + 1, in_flight)
            started += (
                time.monotonic() - waiting
            )  # the wait is for generation, which the loop would wait for anyway
            if generated.cursor is None:
                self._rollout.save_data_source(rollout_id)
            self._save_hf_inside(self._staged)
        self._finish_save(wait=not self._args.async_save)
        self._save_hf_beside(rollout_id)
        self._log({"perf/save_model_time": time.monotonic() - started}, "rollout", rollout_id)

    def _save_hf_inside(self, staged: StagedCheckpoint) -> None:
        """A Hugging Face folder whose place is in the checkpoint's own is part of the transaction."""
        path = self._hf_path(staged.rollout_id)
        if path is not None and path.is_relative_to(staged.final.resolve()):
            self._trainer.save_hf(staged.staging.resolve() / path.relative_to(staged.final.resolve()))

    def _save_hf_beside(self, rollout_id: int) -> None:
        """Elsewhere it is written after the checkpoint, which stays whatever becomes of it."""
        path = self._hf_path(rollout_id)
        if path is None or path.is_relative_to(step_path(self._args.save, rollout_id).resolve()):
            return
        try:
            with naming_disk_errors("--save-hf", path.parent, rollout_id):
                self._trainer.save_hf(path)
        except Exception:
            self._finish_save(wait=True)
            raise

    def _hf_path(self, rollout_id: int) -> Path | None:
        template = self._args.save_hf
        return Path(template.format(rollout_id=rollout_id)).resolve() if template else None

    def _finish_save(self, *, wait: bool) -> None:
        """Complete the checkpoint that ranks write in the background,
        if they are done (or as soon as they are).
        """
        staged = self._staged
        if staged is None:
            return
        with self._naming_disk_errors(staged.rollout_id):
            files = self._trainer.finish_save(wait=wait)
            if files is None:
                return
            checkpoint = staged.complete(files, self._args.keep_last_n)
        self._staged = None
        self._checkpoint_bytes = sum(record.num_bytes for record in checkpoint.manifest.files.values())

    @contextlib.contextmanager
    def _naming_disk_errors(self, rollout_id: int) -> Iterator[None]:
        """A checkpoint that cannot be written is told with the disk's reason, and
        what there is of it gives its room back.
        """
        try:
            with naming_disk_errors("--save", Path(self._args.save), rollout_id):
                yield
        except Exception:
            discard_staged(self._args.save)
            self._staged = None
            raise

    def _log(self, metrics: dict[str, Any], stage: str, step: int) -> None:
        self._tracker.log(metrics, f"{stage}/step", step)


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


def _headline(metrics: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name.partition('/')[2]} {metrics[name]:.4g}" for name in names if name in metrics)


def _end_in_order(steps: Sequence[Callable[[], object]], cause: BaseException | None) -> None:
    """Take every step, whatever the one before raised. The first failure is that
    of the run, unless it has a cause already.
    """
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:  # told below
            failures.append(failure)
    told = failures if cause is not None else failures[1:]
    for failure in told:
        logger.warning("while the run ended: %s: %s", type(failure).__name__, failure)
    if cause is None and failures:
        raise failures[0]


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")
