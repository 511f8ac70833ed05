"""Brings a run up, in the order in which its parts need each other, and takes it down again."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from slime.arguments import Args, explain_batch
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.cluster.canary.canary import Canary
from slime.cluster.checkpoints.checkpoint import resolve_load, rollout_state
from slime.cluster.checkpoints.in_flight import read_in_flight, tell_differences
from slime.cluster.checkpoints.published import Models
from slime.cluster.checkpoints.run_ledger import Resume, find_resume
from slime.cluster.checkpoints.save_folder import (
    look_at_folders,
    naming_full_disks,
    open_model_folder,
    open_save_folder,
    prepare_folder,
)
from slime.cluster.checkpoints.saving import Saver
from slime.cluster.closing import Closing
from slime.cluster.cluster import Cluster
from slime.cluster.driver_spans import Timeline
from slime.cluster.hang_watch import HangWatch
from slime.cluster.host_check import check_hosts
from slime.cluster.residency import TRAIN, Residency
from slime.cluster.restart.batches import Batches
from slime.cluster.restart.faults import headline
from slime.cluster.restart.peer_copies import PeerCopies
from slime.cluster.restart.places import find_places
from slime.cluster.restart.recovery import Recovery, Restart
from slime.cluster.restart.redo import Redo, SafeState
from slime.cluster.restart.start_check import readable
from slime.cluster.rollout_manager import Generated, RolloutFacts, RolloutManager, RolloutProcess
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_opening import close_run, note_restart, open_run
from slime.cluster.run_requests import Requests
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.loaded_weights import begins_as_served
from slime.cluster.serving.served_model import trains_on_every_gpu
from slime.cluster.training.release import TrainerRelease
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import RankProcesses, Ranks, TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.observability import phases
from slime.observability.advisories import Advisor, Advisory, Facts
from slime.observability.counters import Counters
from slime.observability.incidents import keeping_incidents
from slime.observability.logging_utils import configure_logger
from slime.observability.terminal.capture import log_to
from slime.observability.tracking import Tracker
from slime.preflight.all_checks import preflight
from slime.preflight.findings import COST, Report
from slime.runtime import create_runtime
from slime.runtime.base import Future, Handle, Runtime, WorkerDied, WorkerSpec, gather, in_background
from slime.runtime.janitor import Janitor
from slime.runtime.placement import Placement, plan_placement
from slime.utils import waits
from slime.utils.errors import EndedBySignal, NotStarted
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.step_folders import StepFolder
from slime.utils.machine import shm, stacks
from slime.utils.machine.accelerator import device_count, has_bfloat16
from slime.utils.machine.garbage import searching_new_only
from slime.utils.machine.run_identity import Run
from slime.utils.models.model_config import context_of
from slime.utils.types import RolloutBatch
from slime.weight_sync import Site, choose_adapter_transport, choose_transport

logger = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 120.0  # overdue is a failure of the run: generous
_ENGINES_CLOSE_DEADLINE_S = 60.0
_READ_DEADLINE_S = 600.0  # a batch from the ledger


# `open_cluster`, or what stands for it in a simulation.
OpenCluster = Callable[..., contextlib.AbstractContextManager[Cluster]]


@contextlib.contextmanager
def open_cluster(args: Args, *, overlapped: bool = False) -> Iterator[Cluster]:
    """A run that is ready to loop; whatever ends the block, no process, port or shared memory is left.

    `overlapped`: the loop has a rollout in flight while it trains, and goes on with the one that a checkpoint
    holds.
    """
    configure_logger(level=args.log_level)
    report = look_before_start(args, overlapped=overlapped)
    logger.info("%s", explain_batch(args))
    logger.info("precision: %s (%s)", args.dtype, args.sources["dtype"])
    if args.use_dynamic_batch_size:
        limit = args.sources["max_tokens_per_gpu"]
        logger.info("micro-batches hold at most %d tokens (%s)", args.max_tokens_per_gpu, limit)
    with contextlib.ExitStack() as folders:  # given back last
        if args.save is not None:
            folders.callback(open_save_folder(args).release)
        if args.save_hf is not None:
            open_model_folder(args)
        checkpoint = resolve_load(args.load, args.save, args.ckpt_step)
        prepare_folder("--run-dir", Path(args.run_dir))
        folders.callback(FolderLock(Path(args.run_dir), "--run-dir").release)
        run = open_run(args, checkpoint)
        ended: list[str | None] = []  # how, where the loop came to its end
        folders.push(lambda kind, error, trace: close_run(run, error, *ended))
        folders.enter_context(naming_full_disks(args))
        log = run.run_dir / "logs" / "driver.log"
        folders.enter_context(log_to(log))
        folders.enter_context(stacks.answering(log))
        folders.enter_context(keeping_incidents(run.run_dir))
        for finding in (*report.of("warning"), *report.of("note")):
            is_note = finding.kind == "note"
            shown = {"shown_elsewhere": True} if is_note and finding.subject == COST else None
            level = logging.INFO if is_note else logging.WARNING
            logger.log(level, "before the start: %s", finding, extra=shown)
        models = Models(args, run.run_dir)
        tracker = Tracker(args, run.run_dir)
        runtime = create_runtime(args, run.run_dir, run.shm_prefix)
        with Closing() as closing:
            closing.add(tracker.finish)
            closing.add(Janitor(shm.FOLDER, run.shm_prefix).dismiss)
            closing.add(shm.hold(run.shm_prefix))
            closing.add(lambda: shm.unlink_prefix(run.shm_prefix))
            watch = HangWatch(run.run_dir, runtime, args.hang_timeout_s)
            closing.add(watch.close)
            closing.add(runtime.close)
            if threading.current_thread() is threading.main_thread():
                # A polite end closes everything in order, like Ctrl-C; after the run it is what it was.
                for number in (signal.SIGTERM, signal.SIGHUP):
                    if signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
                        before = signal.signal(number, _raise_interrupt)
                        folders.callback(signal.signal, number, before or signal.SIG_DFL)
            with watch.guarding():
                cluster = _start(args, run, runtime, tracker, checkpoint, overlapped, closing, models)
                cluster.plan = report.plan
                cluster.counters = Counters.of_run(run.run_dir, cluster.schedule.start, args)
                cluster.requests.take_up(cluster)
                try:
                    with searching_new_only():
                        yield cluster
                except BaseException:
                    if cluster.saver is not None:
                        cluster.saver.tell_of_loss()
                    raise
                ended.append(cluster.stopped)
                _finish(cluster)
        models.finish()  # engines and trainer have given their devices back


def look(args: Args, *, overlapped: bool) -> Report:
    """What keeps a run from starting, without a start: its folders too, which a run itself looks at next."""
    report = preflight(args, overlapped=overlapped)
    return replace(report, findings=(*report.findings, *(look_at_folders(args) if args.dry_run else ())))


def look_before_start(args: Args, *, overlapped: bool) -> Report:
    """NotStarted with all that is wrong, before anything is written or started."""
    with phases.starting(phases.CHECKS) as ended:
        report = look(args, overlapped=overlapped)
        report.raise_errors()
        ended.cost = tuple(finding.text for finding in report.findings if finding.subject == COST)
        ended.note = f"{len(report.of('warning'))} warnings" if report.of("warning") else "all well"
    if args.dry_run:
        raise NotStarted("--dry-run: nothing keeps this run from starting; leave the flag out to start it.")
    return report


def _finish(cluster: Cluster) -> None:
    """The end of a run that did not fail: its last checkpoint is completed, and the ranks part in order."""
    with Closing() as closing:
        closing.add(lambda: _part(cluster))
        if cluster.saver is not None:
            saver, last = cluster.saver, cluster.schedule.num_rollout - 1
            closing.add(lambda: cluster.recovery.run(lambda: saver.finish(wait=True), last))


def _part(cluster: Cluster) -> None:
    """All is done and saved: a rank that is lost now is nobody's loss."""
    try:
        gather(cluster.trainer.ranks.begin(TrainActor.close), _CLOSE_DEADLINE_S)
    except WorkerDied as error:
        if not cluster.recovery.is_on:
            raise
        logger.warning("while the run ended: %s", headline(error))


def _start(
    args: Args,
    run: Run,
    runtime: Runtime,
    tracker: Tracker,
    checkpoint: StepFolder | None,
    overlapped: bool,
    closing: Closing,
    models: Models,
) -> Cluster:
    """Engines and trainer start side by side. `closing`: takes down what was started, also half-way."""
    plan = plan_placement(args, min(device_count(), args.num_gpus_per_node), runtime.num_machines)
    placement = runtime.claim(plan)
    check_hosts(args, runtime, checkpoint)
    run = replace(run, host=placement.host)
    spec = WorkerSpec(name="rollout", near_driver=True)
    process = runtime.spawn(spec, RolloutProcess, args, run, placement, runtime)
    closing.add(lambda: process.call_control(RolloutProcess.close).result(_ENGINES_CLOSE_DEADLINE_S))
    launched = process.call(RolloutProcess.launch)
    ranks = RankProcesses(args, run, runtime, placement.trainer)
    checkpoint = _verify(args, checkpoint, ranks)  # while engines load
    beginning = begin_at(args, run, checkpoint, overlapped)
    engines = process.part(RolloutProcess.weights)
    residency = Residency(args, engines, ranks.actors)
    rollout = process.call(
        RolloutProcess.start, beginning.rollout_id, beginning.rollout_state, beginning.resume
    )
    folder = checkpoint.trainer if checkpoint is not None else None

    def note_loaded() -> None:
        if placement.engines and placement.trainer and begins_as_served(args, folder):
            engines.call_control(EngineWeights.note_loaded).result(_READ_DEADLINE_S)

    facts, trainer = _load_both(
        args, (launched, rollout), len(placement.engines), ranks, folder, residency, note_loaded
    )

    def expect_rollouts() -> None:
        if args.num_rollout is None:
            trainer.ranks.call(TrainActor.expect_rollouts, facts.num_rollout)

    expect_rollouts()
    push = _open_push(args, run, placement, facts, trainer.ranks, engines, residency, beginning.num_pushes)

    def prepare_again() -> None:
        expect_rollouts()
        if push is not None:
            push.open_senders()

    limit = args.max_restarts if placement.trainer else 0
    ledgered = args.save is not None and args.record_max_mib > 0 and not args.no_save_optim
    start = SafeState(args, folder, beginning.rollout_id - 1)
    redo = Redo(start, is_on=limit > 0, num_states=None if ledgered else 2)
    release = TrainerRelease(args, ranks, folder, prepare_again) if args.release_train else None
    manager = process.part(RolloutProcess.manager)
    restore = partial(_restore, args, runtime, placement, ranks, trainer, residency, prepare_again)
    recovery = Recovery(limit, ranks, runtime, redo, restore, partial(_tell_restart, run))
    batches = _open_batches(manager if ledgered else None)
    recording = process.part(RolloutProcess.recording) if args.record_max_mib else None
    return Cluster(
        args,
        run,
        RolloutSchedule(args, beginning.rollout_id, facts.num_rollout, facts.num_rollout_per_epoch),
        manager,
        trainer,
        residency,
        push,
        _open_saver(args, trainer, manager, models, redo, batches),
        tracker,
        _open_advisor(args, overlapped),
        recovery,
        redo,
        batches,
        beginning.taken_up,
        Timeline(recording),
        Requests(recording),
        PeerCopies(args, run.shm_prefix, ranks, redo) if args.peer_copies and limit else None,
        _open_canary(args, trainer, engines, residency, facts, push),
        release,
    )


def _restore(
    args: Args,
    runtime: Runtime,
    placement: Placement,
    ranks: RankProcesses,
    trainer: TrainGroup,
    residency: Residency,
    prepare_again: Callable[[], None],
    state: SafeState,
) -> None:
    """Start lost ranks again and bring all of them back to `state`."""
    residency.enter(TRAIN)  # engines make room, as for any step
    ranks.move(find_places(args, runtime, placement.trainer))
    check_hosts(args, runtime, None)  # a host that takes the place of a lost one
    ranks.renew(state.args)
    trainer.layouts = ranks.load_again(readable(state, ranks, verify=not args.no_load_verify))
    prepare_again()
    _remember(trainer, state)


def _open_saver(
    args: Args,
    trainer: TrainGroup,
    manager: Handle[RolloutManager],
    models: Models,
    redo: Redo,
    batches: Batches,
) -> Saver | None:
    """Build what writes checkpoints and models; what precedes a checkpoint need not be done again."""
    if args.save is None and (args.save_hf is None or args.debug_rollout_only):
        return None

    def commit(rollout_id: int) -> None:
        redo.commit(rollout_id)
        batches.forget(redo.oldest.rollout_id)

    folder = Path(args.save) if args.save is not None else None
    return Saver(folder, args.save_hf, args.keep_last_n, trainer.ranks, manager, models, commit)


def _open_canary(
    args: Args,
    trainer: TrainGroup,
    engines: Handle[EngineWeights],
    residency: Residency,
    facts: RolloutFacts,
    push: WeightPush | PushToNobody | None,
) -> Canary | None:
    """Compares engines and trainer, where engines get the trainer's weights."""
    if not facts.probe or not isinstance(push, WeightPush):
        return None
    return Canary(args, trainer, engines, residency, facts.probe)


def _load_both(
    args: Args,
    starting: tuple[Future[None], Future[RolloutFacts]],
    num_engines: int,
    ranks: RankProcesses,
    folder: Path | None,
    residency: Residency,
    note_loaded: Callable[[], None],
) -> tuple[RolloutFacts, TrainGroup]:
    """Wait until engines and trainer are ready; the first failure ends the wait."""
    launched, rollout = starting

    def when_served() -> None:
        rollout.result()
        note_loaded()

    def progress() -> str:
        engines_are = "serve" if rollout.done() else "are not up yet"
        return f"starting: {ranks.describe()}, {num_engines} engine(s) {engines_are}"

    with waits.telling(progress):
        if args.colocate:  # engines size their memory first
            first: list[Future[object]] = [launched, rollout, in_background(ranks.warm_up, "trainer-warm-up")]
            gather(first)
            residency.make_room()
        loading = in_background(lambda: ranks.load(folder), "trainer-start")
        both: list[Future[object]] = [launched, rollout, loading, in_background(when_served, "engines-noted")]
        gather(both)
    return rollout.result(), loading.result()


def _remember(trainer: TrainGroup, state: SafeState) -> None:
    """New ranks get what their checkpoint does not hold."""
    if state.memories:  # the same on all ranks, of which there may be more or fewer now
        trainer.ranks.call(TrainActor.remember, state.memories[0])
    for name, value in state.settings.items():
        trainer.ranks.call(TrainActor.change_setting, name, value)


def _open_batches(manager: Handle[RolloutManager] | None) -> Batches:
    """Batches that may have to be trained on again: from the ledger; None: it does not keep them."""
    if manager is None:
        return Batches(None)

    def read_batch(rollout_id: int) -> RolloutBatch | None:
        return manager.call_control(RolloutManager.made_batch, rollout_id).result(_READ_DEADLINE_S)

    return Batches(read_batch)


def _tell_restart(run: Run, restart: Restart) -> None:
    """Writes the restart to run.json, which `slime status` reads, and gives advice the first time."""
    note_restart(run, restart.rollout_id, restart.cause, restart.begins_from)
    if restart.number == 1:
        advice = Advisory(
            "trainer_restarted",
            f"the trainer was lost at step {restart.rollout_id + 1} ({restart.cause}) and starts again from "
            f"{restart.begins_from}",
            f"look into {run.run_dir}/logs for the cause; a smaller --save-interval costs fewer steps",
        )
        logger.warning("advice: %s", advice, extra={"advisory": advice})


def _open_advisor(args: Args, overlapped: bool) -> Advisor:
    """Who tells a run that works but does not learn; what the settings alone show is told now."""
    facts = Facts(
        samples_per_prompt=args.n_samples_per_prompt,
        max_response_len=args.rollout_max_response_len,
        context_len=context_of(args.hf_checkpoint) if args.hf_checkpoint else None,
        saves=args.save is not None or args.save_hf is not None,
        overlapped=overlapped,
        by_rewards=args.loss_type not in SUPERVISED_LOSSES and not args.debug_rollout_only,
        has_teacher=args.use_opd,
    )
    advisor = Advisor(facts)
    for advice in advisor.at_start():
        logger.warning("advice: %s", advice, extra={"advisory": advice})
    return advisor


def _verify(args: Args, checkpoint: StepFolder | None, ranks: RankProcesses) -> StepFolder | None:
    """Every file against its checksum. Where one differs it is named, and the checkpoint before is taken."""
    if checkpoint is None or args.no_load_verify:
        return checkpoint
    if checkpoint.manifest.files is None:
        logger.warning("%s has no checksums (an older slime wrote it): loaded as it is", checkpoint.path)
    started = time.monotonic()
    found = resolve_load(
        args.load,
        args.save,
        args.ckpt_step,
        damage_of=lambda step: ranks.find_damage(step.path, step.manifest.files or {}),
        latest=checkpoint.manifest.rollout_id,
    )
    assert found is not None, "a folder that held a checkpoint holds one, or says why not"
    logger.info("%s is what was written (%.1f s)", found.path, time.monotonic() - started)
    return found


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins or goes on. `taken_up`: by rollout, what was in flight at the checkpoint."""

    rollout_id: int
    resume: Resume
    rollout_state: dict[str, Any] | None = None
    num_pushes: int = 0
    taken_up: dict[int, Generated] = field(default_factory=dict)


def begin_at(args: Args, run: Run, checkpoint: StepFolder | None, overlapped: bool) -> Beginning:
    """The rollout to begin at: after the checkpoint and the rollouts behind it that were complete."""
    if args.finetune or (checkpoint is None and args.start_rollout_id is not None):
        resume = find_resume(args, run, (args.start_rollout_id or 0) - 1, overlapped=overlapped)
        return Beginning(args.start_rollout_id or 0, replace(resume, last_made=resume.committed, made={}))
    committed, num_pushes, in_flight = -1, 0, None
    if checkpoint is not None:
        committed, num_pushes = checkpoint.manifest.rollout_id, checkpoint.manifest.num_pushes
        logger.info("resuming after rollout %d from %s", committed, checkpoint.path)
        in_flight = read_in_flight(checkpoint)
    resume = find_resume(args, run, committed, overlapped=overlapped)
    taken_up = {rollout_id: Generated(**value) for rollout_id, value in resume.made.items()}
    if not taken_up and in_flight is not None and overlapped:
        taken_up, resume = {committed + 1: in_flight}, replace(resume, last_made=committed + 1)
    if checkpoint is not None:
        found = taken_up.get(committed + 1, in_flight)
        tell_differences(args, checkpoint, found, overlapped=overlapped, ledgered=bool(resume.made))
    if taken_up:  # the data source goes on behind them
        state = taken_up[max(taken_up)].cursor
    else:
        state = rollout_state(checkpoint) if checkpoint is not None else None
    return Beginning(committed + 1, replace(resume, made={}), state, num_pushes, taken_up)


def _open_push(
    args: Args,
    run: Run,
    placement: Placement,
    facts: RolloutFacts,
    ranks: Ranks[TrainActor],
    engines: Handle[EngineWeights],
    residency: Residency,
    num_done: int,
) -> WeightPush | PushToNobody | None:
    """What brings the trainer's weights to the engines; None where nothing trains."""
    if not placement.trainer:
        return None
    if not placement.engines:
        return PushToNobody(ranks, num_done)
    site = Site(device_count() > 0, args.colocate, trains_on_every_gpu(args, placement))
    transport = (
        choose_adapter_transport(facts.transports)
        if args.lora_sync == "adapter"
        else choose_transport(args.update_weight_transport, facts.transports, site, args.update_weight_mode)
    )
    logger.info("weights travel by %s", transport)
    # Engines get the precision that the trainer computes in; None: that of the master weights.
    half = args.dtype == "bfloat16" or (args.dtype == "auto" and has_bfloat16())
    return WeightPush(
        *(ranks, engines, residency, run.pushes_as, "bfloat16" if half else None, num_done),
        transport=transport,
        engine_urls=facts.engine_urls,
    )


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise EndedBySignal(number)
