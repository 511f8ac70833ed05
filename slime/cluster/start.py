"""Opens a run and closes it again: folders, log, signals, processes."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from slime.arguments import Args, explain_batch
from slime.catalog.deadlines import timeout_s
from slime.cluster.checkpoints.checkpoint import resolve_load
from slime.cluster.checkpoints.published import Models
from slime.cluster.checkpoints.save_folder import (
    check_folders,
    naming_full_disks,
    open_model_folder,
    open_save_folder,
    prepare_folder,
)
from slime.cluster.closing import Closing
from slime.cluster.cluster import Cluster
from slime.cluster.parts import Parts
from slime.cluster.run_opening import close_run, open_run
from slime.cluster.system_curves import SystemCurves
from slime.liveness import phases, stacks
from slime.liveness.hang_watch import HangWatch
from slime.observability.logging_utils import configure_logger
from slime.observability.terminal.capture import log_to
from slime.observability.tracking import Tracker
from slime.preflight.all_checks import preflight
from slime.preflight.findings import COST, Report
from slime.runtime import create_runtime
from slime.runtime.janitor import Janitor
from slime.utils.errors import EndedBySignal, NotStarted
from slime.utils.files.folder_lock import FolderLock
from slime.utils.machine import shm
from slime.utils.machine.garbage import searching_new_only

logger = logging.getLogger(__name__)

# `open_cluster`, or what a simulation uses instead.
OpenCluster = Callable[..., contextlib.AbstractContextManager[Cluster]]


@contextlib.contextmanager
def open_cluster(args: Args, *, overlapped: bool = False) -> Iterator[Cluster]:
    """Yield a run that is ready to loop; whatever ends the block, no process, port or shared memory is left.

    `overlapped`: the loop has a rollout in flight while it trains, and resumes with the one that a checkpoint
    holds.
    """
    configure_logger(level=args.log_level)
    report = check_before_start(args, overlapped=overlapped)
    logger.info("%s", explain_batch(args))
    logger.info("Precision: %s (%s)", args.dtype, args.sources["dtype"])
    if args.use_dynamic_batch_size:
        limit = args.sources["max_tokens_per_gpu"]
        logger.info("Micro-batches hold at most %d tokens (%s)", args.max_tokens_per_gpu, limit)
    with contextlib.ExitStack() as folders:  # given back last
        if args.save is not None:
            folders.callback(open_save_folder(args).release)
        if args.save_hf is not None:
            open_model_folder(args)
        checkpoint = resolve_load(args.load, args.save, args.ckpt_step)
        prepare_folder("--run-dir", Path(args.run_dir))
        folders.callback(FolderLock(Path(args.run_dir), "--run-dir").release)
        run = open_run(args, checkpoint)
        ended: list[str | None] = []  # why it was stopped, where the loop came to its end
        folders.push(lambda kind, error, trace: close_run(run, error, *ended))
        folders.enter_context(naming_full_disks(args))
        log = run.run_dir / "logs" / "driver.log"
        folders.enter_context(log_to(log))
        folders.enter_context(stacks.answering(log))
        _log_findings(report)
        models = Models(args, run.run_dir)
        tracker = Tracker(args, run.run_dir)
        runtime = create_runtime(args, run.run_dir, run.shm_prefix)
        with Closing() as closing:
            closing.add(tracker.finish)
            # The run's shared memory is freed even if this process is killed.
            closing.add(Janitor(shm.FOLDER, run.shm_prefix).dismiss)
            closing.add(shm.hold(run.shm_prefix))
            closing.add(lambda: shm.unlink_prefix(run.shm_prefix))
            watch = HangWatch(run.run_dir, runtime, timeout_s(args, "hang"))
            closing.add(watch.close)
            closing.add(runtime.close)
            closing.add(SystemCurves(run.run_dir, runtime).close)
            _end_on_signals(folders)
            with watch.guarding():
                parts = Parts(
                    args=args,
                    run=run,
                    runtime=runtime,
                    closing=closing,
                    tracker=tracker,
                    models=models,
                    overlapped=overlapped,
                    prediction=report.plan,
                )
                cluster = parts.start(checkpoint)
                cluster.requests.restore_settings(cluster)
                with searching_new_only():
                    yield cluster
                ended.append(cluster.stopped)
                cluster.trainer.finish(cluster.schedule.num_rollout - 1)
        models.finish()  # engines and trainer have given their devices back


def check(args: Args, *, overlapped: bool) -> Report:
    """Report what keeps a run from starting; with --dry-run also its folders, which a run opens itself."""
    report = preflight(args, overlapped=overlapped)
    return replace(report, findings=(*report.findings, *(check_folders(args) if args.dry_run else ())))


def check_before_start(args: Args, *, overlapped: bool) -> Report:
    """Raise NotStarted with all problems found, before anything is written or started."""
    with phases.starting(phases.CHECKS) as ended:
        report = check(args, overlapped=overlapped)
        report.raise_errors()
        ended.cost = tuple(finding.text for finding in report.findings if finding.subject == COST)
        ended.note = f"{len(w)} warning{'s' * (len(w) > 1)}" if (w := report.of("warning")) else "all well"
    if args.dry_run:
        raise NotStarted("--dry-run: no problem was found; leave the flag out to start this run.")
    return report


def _log_findings(report: Report) -> None:
    for finding in (*report.of("warning"), *report.of("note")):
        is_note = finding.kind == "note"
        shown = {"shown_elsewhere": True} if is_note and finding.subject == COST else None
        logger.log(logging.INFO if is_note else logging.WARNING, "before the start: %s", finding, extra=shown)


def _end_on_signals(until: contextlib.ExitStack) -> None:
    """Close everything in order at SIGTERM and SIGHUP, as at Ctrl-C; the old handlers return afterwards."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
            before = signal.signal(number, _raise_interrupt)
            until.callback(signal.signal, number, before or signal.SIG_DFL)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise EndedBySignal(number)
