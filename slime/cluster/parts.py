"""Starts the parts of a run: engines, the rollout side and trainer ranks, each as early as possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.precision import SIXTEEN_BITS
from slime.cluster.canary.canary import Canary
from slime.cluster.checkpoints.published import Models
from slime.cluster.checkpoints.resume_point import ResumePoint, find_resume_point, verify_checkpoint
from slime.cluster.checkpoints.saving import Saver
from slime.cluster.closing import Closing
from slime.cluster.cluster import Cluster, Requests
from slime.cluster.driver_spans import Timeline
from slime.cluster.host_check import check_hosts
from slime.cluster.residency import Residency
from slime.cluster.restart.recovery import Recovery
from slime.cluster.restart.replay import KeptBatches, ReplayLog, SafeState
from slime.cluster.restart.restore import PeerCopies, Restorer, TrainerRelease
from slime.cluster.rollout_manager import RolloutFacts, RolloutManager, RolloutProcess
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_log import RunLog
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.loaded_weights import starts_as_served
from slime.cluster.serving.served_model import takes_handles
from slime.cluster.trainer import Trainer
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import RankProcesses, Ranks, TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.observability.advisories import Advisor, Facts
from slime.observability.tracking import Tracker
from slime.preflight.findings import Prediction
from slime.runtime.base import Future, Handle, Runtime, WorkerSpec, gather
from slime.runtime.placement import Placement, num_machines_needed, plan_placement
from slime.utils.async_utils import in_background
from slime.utils.files.run_file import add_restart
from slime.utils.files.step_folders import StepFolder
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch
from slime.weight_sync.base import Site
from slime.weight_sync.transports import choose_adapter_transport, choose_transport

logger = logging.getLogger(__name__)

_ENGINES_CLOSE_DEADLINE_S = 60.0
_COPY_DEADLINE_S = 900.0  # of a record of a GiB to a slow network file system
_READ_DEADLINE_S = 600.0  # a batch from the ledger


@dataclass(kw_only=True)
class Parts:
    """Builds a `Cluster`. `closing` ends every part that was started, even if the start fails half-way."""

    args: Args
    run: Run
    runtime: Runtime
    closing: Closing
    tracker: Tracker
    models: Models
    overlapped: bool
    prediction: Prediction | None

    def start(self, checkpoint: StepFolder | None) -> Cluster:
        """Start engines and trainer side by side, and return when both are ready."""
        args, runtime = self.args, self.runtime
        plan = plan_placement(args, *_find_devices(args, runtime))
        placement = runtime.claim(replace(plan, spreads=args.rollout_workers > 1))
        check_hosts(args, runtime, checkpoint)
        self.run = replace(self.run, host=placement.host)
        spec = WorkerSpec(name="rollout", near_driver=True)
        process = runtime.spawn(spec, RolloutProcess, args, self.run, placement, runtime)
        self.closing.add(lambda: process.call_control(RolloutProcess.close_record).result(_COPY_DEADLINE_S))
        self.closing.add(lambda: process.call_control(RolloutProcess.close).result(_ENGINES_CLOSE_DEADLINE_S))
        launched = process.call(RolloutProcess.launch)
        ranks = RankProcesses(args, self.run, runtime, placement.trainer)
        checkpoint = verify_checkpoint(args, checkpoint, ranks.find_damage)  # while engines load
        point = find_resume_point(args, self.run, checkpoint, self.overlapped)
        folder = checkpoint.trainer if checkpoint is not None else None
        engines = process.part(RolloutProcess.weights)
        residency = Residency(args, engines, ranks.actors)
        rollout = process.call(RolloutProcess.start, point.rollout_id, point.rollout_state, point.resume)

        facts, group = _load_both(args, (launched, rollout), ranks, folder, residency)
        if placement.engines and placement.trainer and starts_as_served(args, folder):
            engines.call_control(EngineWeights.note_loaded).result(_READ_DEADLINE_S)
        manager = process.part(RolloutProcess.manager)
        recording = process.part(RolloutProcess.recording) if args.record_max_mib else None
        timeline = Timeline(recording)
        trainer = self._build_trainer(
            placement, ranks, group, residency, manager, engines, timeline, facts, point, folder
        )
        return Cluster(
            args=args,
            run=self.run,
            schedule=RolloutSchedule(args, point.rollout_id, facts.num_rollout, facts.num_rollout_per_epoch),
            rollout=manager,
            trainer=trainer,
            log=RunLog(self.tracker, open_advisor(args, self.overlapped), self.prediction),
            timeline=timeline,
            requests=Requests(recording),
            restored=point.restored,
        )

    def _build_trainer(
        self,
        placement: Placement,
        ranks: RankProcesses,
        group: TrainGroup,
        residency: Residency,
        manager: Handle[RolloutManager],
        engines: Handle[EngineWeights],
        timeline: Timeline,
        facts: RolloutFacts,
        point: ResumePoint,
        folder: Path | None,
    ) -> Trainer:
        """Put the trainer together with what restarts it; `folder`: the checkpoint it has loaded."""
        args = self.args

        push = _choose_push(
            args, self.run, placement, facts, group.ranks, engines, residency, point.num_pushes
        )

        def prepare() -> None:
            if args.num_rollout is None:  # before senders are opened, which see the number, too
                group.ranks.call(TrainActor.expect_rollouts, facts.num_rollout)
            if push is not None:
                push.open_senders()

        prepare()

        def read_batch(rollout_id: int) -> RolloutBatch | None:
            return manager.call_control(RolloutManager.made_batch, rollout_id).result(_READ_DEADLINE_S)

        limit = args.max_restarts if placement.trainer else 0
        ledgered = args.save is not None and args.record_max_mib > 0 and not args.no_save_optim
        replay = ReplayLog(
            SafeState(args, folder, point.rollout_id - 1),
            KeptBatches(read_batch if ledgered else None),
            is_on=limit > 0,
            num_states=None if ledgered else 2,
        )
        restorer = Restorer(args, self.runtime, placement.trainer, ranks, group, residency, prepare)
        saver = None
        if args.save is not None or (args.save_hf is not None and not args.debug_rollout_only):
            folder_ = Path(args.save) if args.save is not None else None
            saver = Saver(
                *(folder_, args.save_hf, args.keep_last_n, group.ranks, manager, self.models, replay.commit)
            )
        report = partial(_record_restart, self.run)
        shm_prefix = self.run.shm_prefix
        compares = facts.probe and isinstance(push, WeightPush)
        return Trainer(
            args=args,
            run=self.run,
            group=group,
            residency=residency,
            timeline=timeline,
            recovery=Recovery(limit, ranks, self.runtime, replay, restorer.restore, report),
            replay=replay,
            weight_push=push,
            saver=saver,
            copies=PeerCopies(args, shm_prefix, ranks, replay) if args.peer_copies and limit else None,
            release=TrainerRelease(restorer, folder) if args.release_train else None,
            canary=Canary(args, group, engines, residency, facts.probe) if compares else None,
        )


def _find_devices(args: Args, runtime: Runtime) -> tuple[int, int]:
    """Return the number of devices per machine and of machines, once enough machines are there."""
    num_gpus = 0
    while True:
        num_machines = runtime.find_machines(num_machines_needed(args, num_gpus), num_gpus)
        now = min(runtime.gpus_of_machine(), args.num_gpus_per_node)
        if now == num_gpus:
            return num_gpus, num_machines
        num_gpus = now  # machines that have joined, or left, meanwhile


def _load_both(
    args: Args,
    starting: tuple[Future[None], Future[RolloutFacts]],
    ranks: RankProcesses,
    folder: Path | None,
    residency: Residency,
) -> tuple[RolloutFacts, TrainGroup]:
    """Wait until engines and trainer are ready; the first failure ends the wait."""
    launched, rollout = starting

    if args.colocate:  # engines size their memory first
        first: list[Future[object]] = [launched, rollout, in_background(ranks.warm_up, "trainer-warm-up")]
        gather(first)
        residency.make_room()
    loading = in_background(lambda: ranks.load(folder), "trainer-start")
    both: list[Future[object]] = [launched, rollout, loading]
    gather(both)
    return rollout.result(), loading.result()


def _record_restart(run: Run, restart: dict[str, Any]) -> None:
    """Write the restart to run.json, which `slime status` reads."""
    try:
        add_restart(run.run_dir, restart)
    except OSError as failure:
        logger.warning("%s: the restart was not recorded: %s", run.run_dir, failure)


def open_advisor(args: Args, overlapped: bool) -> Advisor:
    """Build the advisor, and report what the settings alone already show."""
    facts = Facts(
        samples_per_prompt=args.n_samples_per_prompt,
        max_response_len=args.rollout_max_response_len,
        saves=args.save is not None or args.save_hf is not None,
        overlapped=overlapped,
        by_rewards=args.loss_type not in SUPERVISED_LOSSES and not args.debug_rollout_only,
        has_teacher=args.use_opd,
    )
    advisor = Advisor(facts)
    for advice in advisor.at_start():
        logger.warning("advice: %s", advice, extra={"advisory": advice})
    return advisor


def _choose_push(
    args: Args,
    run: Run,
    placement: Placement,
    facts: RolloutFacts,
    ranks: Ranks[TrainActor],
    engines: Handle[EngineWeights],
    residency: Residency,
    num_done: int,
) -> WeightPush | PushToNobody | None:
    """Build what brings the trainer's weights to the engines; None where nothing trains."""
    if not placement.trainer:
        return None
    if not placement.engines:
        return PushToNobody(ranks, num_done)
    on_gpus = bool(placement.trainer[0].gpu_ids)
    site = Site(on_gpus, args.colocate, takes_handles(args, placement))
    transport = (
        choose_adapter_transport(facts.transports)
        if args.lora_sync == "adapter"
        else choose_transport(args.update_weight_transport, facts.transports, site, args.update_weight_mode)
    )
    logger.info("Weights are sent to the engines by the transport %s.", transport)
    # Engines get the precision that the trainer computes in; None: that of the master weights.
    pushed = args.dtype if args.dtype in SIXTEEN_BITS else None
    if args.dtype == "auto" and all(ranks.call(TrainActor.has_bfloat16)):
        pushed = "bfloat16"
    return WeightPush(
        *(ranks, engines, residency, run.pushes_as, pushed, num_done),
        transport=transport,
        engine_urls=facts.engine_urls,
    )
