"""Runs a simulation: the real loop and all its parts, with modelled engines and a modelled trainer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime import loop, loop_async
from slime.arguments import Args
from slime.cluster.checkpoints.checkpoint import resolve_load
from slime.cluster.checkpoints.resume_point import ResumePoint, find_resume_point
from slime.cluster.checkpoints.run_ledger import open_ledger
from slime.cluster.checkpoints.saving import Saver
from slime.cluster.cluster import Cluster, Requests
from slime.cluster.driver_spans import Timeline
from slime.cluster.recording import Recording
from slime.cluster.residency import TRAIN, Residency
from slime.cluster.restart.recovery import Recovery
from slime.cluster.restart.replay import KeptBatches, ReplayLog, SafeState
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_log import RunLog
from slime.cluster.trainer import Trainer
from slime.cluster.weight_push import WeightPush
from slime.record import record_file
from slime.record.audit import Audit, audit
from slime.record.writer import GATHER_S, RecordWriter
from slime.rollout import fully_async_rollout, ledger
from slime.rollout.generation import state as generation_state
from slime.simulation import workload as work
from slime.simulation.clock import Clock, ModelledHandle
from slime.simulation.costs import Costs
from slime.simulation.modelled_engines import ROUTER, ModelledEngine, ModelledFleet
from slime.simulation.modelled_session import ModelledSession
from slime.simulation.modelled_trainer import ModelledProcesses, ModelledTrainGroup
from slime.utils import http_utils
from slime.utils.errors import WorkerDied
from slime.utils.machine.run_identity import Run

_MAX_STARTS = 40


class Killed(BaseException):
    """The driver got SIGKILL."""


@dataclass
class Measured:
    """Measurements of a simulated run. Times are virtual seconds; token counts are real."""

    step_ends: list[float] = field(default_factory=list)  # end time of each training step
    logged: dict[int, dict[str, float]] = field(default_factory=dict)  # by rollout
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waste: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # tokens by cause
    wall_s: float = 0.0
    engine_busy: float = 0.0  # share of the engines' time in which they had requests
    engine_running: float = 0.0  # requests at once, on average, of each engine
    trainer_busy: float = 0.0
    engine_tokens: float = 0.0
    trained_tokens: float = 0.0  # of responses
    train_s: float = 0.0
    num_starts: int = 0
    audit: Audit | None = None
    error: str | None = None

    @property
    def step_s(self) -> float:
        """Mean time from one training step to the next; the first step has no predecessor."""
        ends = self.step_ends
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else self.wall_s

    @property
    def wasted(self) -> float:
        """Share of generated tokens that were never trained on."""
        return max(0.0, 1 - self.trained_tokens / self.engine_tokens) if self.engine_tokens else 0.0

    @property
    def staleness(self) -> dict[int, float]:
        """Share of trained tokens by their age in weight pushes."""
        ages: defaultdict[int, float] = defaultdict(float)
        for metrics in self.logged.values():
            for name, value in metrics.items():
                if name.startswith("train/staleness/lag_"):
                    ages[int(name.rpartition("_")[2])] += value
        total = sum(ages.values())
        return {age: ages[age] / total for age in sorted(ages)} if total else {}


class _DelayedWriter:
    """Writes events with a delay, so that a killed process loses the last of them."""

    def __init__(self, clock: Clock, writer: RecordWriter):
        self._clock, self._writer = clock, writer
        self._waiting: list[Callable[[], None]] = []
        self._dead = False

    def note(self, *args: Any) -> None:
        self._later(lambda: self._writer.note(*args))

    def add(self, *args: Any, **kwargs: Any) -> None:
        self._later(lambda: self._writer.add(*args, **kwargs))

    def submit(self, *args: Any) -> None:
        self._later(lambda: self._writer.submit(*args))

    def _later(self, write: Callable[[], None]) -> None:
        if not self._waiting and not self._dead:
            self._clock.at(self._clock.now + GATHER_S, self._write)
        if not self._dead:
            self._waiting.append(write)

    def flush(self) -> None:
        self._write()
        self._writer.flush()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()

    def kill(self) -> None:
        self._dead, self._waiting = True, []

    def close(self) -> None:
        self._write()
        self._dead = True
        self._writer.close()


class _Metrics:
    """Collects a run's metrics with virtual times, in place of `slime.observability.tracking.Tracker`."""

    def __init__(self, clock: Clock, measured: Measured, unit: int):
        self._clock, self._measured, self._unit = clock, measured, unit

    def log(self, metrics: dict[str, float], axis: str, step: int) -> None:
        measured = self._measured
        if axis == "rollout/step":
            measured.logged.setdefault(step, {}).update(metrics)
            for name, value in metrics.items():
                if name.startswith("rollout/groups/"):
                    measured.counts[name.partition("/")[2]] += value
                if name.startswith("rollout/waste/") and name.endswith("/tokens"):
                    measured.waste[name.split("/")[2]] += value * self._unit
            if "perf/step_time" in metrics:
                measured.step_ends.append(self._clock.now)


class Simulation:
    """One run of `args` (see `settings.simulated_args`) from its start to its end, with its restarts.

    `overlapped`: with the asynchronous loop. `keeps`: with checkpoints and the ledger, which is audited.
    """

    def __init__(
        self, args: Args, costs: Costs, workload: work.Workload, *, overlapped: bool, keeps: bool = False
    ):
        self.args, self.costs, self.workload = args, costs, workload
        self.overlapped, self.keeps = overlapped, keeps
        self.clock = Clock()
        self.measured = Measured()
        self._folder = Path()
        self._fleet: ModelledFleet | None = None
        self._trainer: ModelledTrainGroup | None = None
        self._writer: _DelayedWriter | None = None
        self._fleet_s = 0.0  # engines x seconds

    def run(self) -> Measured:
        random.seed(self.workload.seed)  # pauses between attempts
        self.workload.__post_init__()
        with tempfile.TemporaryDirectory(prefix="slime-simulate-", dir=_fast_folder()) as folder:
            self._folder = Path(folder)
            with self.clock.running(), _plug_ins(self.workload):
                http_utils.use_session(self.clock.loop, ModelledSession(self._servers()))
                for fault in self.workload.faults.faults:
                    self.clock.at(fault.at, self._strike, fault)
                self._run_with_restarts()
            self.measured.wall_s = self.clock.now
            if self.keeps and self.measured.error is None:
                self.measured.audit = audit(record_file(self._folder), finished=True)
        return self.measured

    def _run_with_restarts(self) -> None:
        train = loop_async.train if self.overlapped else loop.train
        args = self.args.replace(run_dir=str(self._folder))
        if self.keeps:
            args = args.replace(save=str(self._folder / "save"), load=str(self._folder / "save"))
        while self.measured.num_starts < _MAX_STARTS:
            self.measured.num_starts += 1
            try:
                train(args, opened=self._open)
                return
            except Killed:
                pass
            except WorkerDied:
                if not self.keeps:
                    self.measured.error = "a trainer rank died in a run without --save"
                    return
            self.clock.end_all()  # everything in the driver's memory is lost
            fully_async_rollout._workers.clear()
            ledger.use(None)
            self.clock.run(asyncio.sleep(self.workload.faults.run_restart_s))
        self.measured.error = f"the run was started {_MAX_STARTS} times and did not finish"

    def _strike(self, fault: work.Fault) -> None:
        fleet, plan = self._fleet, self.workload.faults
        if fleet is None or self._trainer is None:
            return  # the run has ended already
        if fault.kind == "engine":
            fleet.die(fault.which, plan.engine_restart_s)
        elif fault.kind == "trainer":
            self._trainer.rank.die()
        elif fault.kind == "driver":
            if self._writer is not None:
                self._writer.kill()
            self.clock.interrupt(Killed())

    @contextlib.contextmanager
    def _open(self, args: Args, *, overlapped: bool = False) -> Iterator[Cluster]:
        """Opens a cluster like `slime.cluster.start.open_cluster`, with modelled processes."""
        run = Run("simulated", self._folder, "simulated", self.measured.num_starts)
        clock, fleet = self.clock, self._modelled_fleet()
        trainer = ModelledTrainGroup(args, clock, self.costs.trainer, self.workload.unit)
        recording = Recording(run, args)
        if recording.writer is not None:
            self._writer = recording.writer = _DelayedWriter(clock, recording.writer)  # type: ignore[assignment]
        began = clock.now
        with contextlib.ExitStack() as closing:
            closing.callback(self._account, fleet, trainer, began)
            closing.callback(recording.close)
            closing.callback(ledger.use, None)
            checkpoint = resolve_load(args.load, args.save, args.ckpt_step)
            point = find_resume_point(args, run, checkpoint, overlapped)
            recording.begin(point.rollout_id)
            durable = open_ledger(args, run, recording, point.resume)
            ledger.use(durable)
            manager = RolloutManager(
                args,
                run,
                fleet,  # type: ignore[arg-type]
                recording,
                point.rollout_id,
                point.rollout_state,
                point.resume,
                durable,
            )
            self._fleet, self._trainer = fleet, trainer
            closing.callback(setattr, self, "_fleet", None)
            rollout = ModelledHandle(clock, manager, "rollout", strands=True)
            weights: Any = ModelledHandle(clock, fleet, "engines")
            residency = Residency(args, weights, trainer.ranks)
            push = WeightPush(
                trainer.ranks,
                weights,
                residency,
                run.pushes_as,
                None,
                point.num_pushes,
                transport="disk",
                engine_urls=fleet.urls,
            )
            push.open_senders()
            recovery, replay = self._recovery(args, point, trainer, residency, push, manager)
            saver = None
            if args.save:
                folder = Path(args.save)
                saver = Saver(folder, None, args.keep_last_n, trainer.ranks, rollout, None, replay.commit)
            facts, timeline = manager.facts, Timeline(None)
            metrics: Any = _Metrics(clock, self.measured, self.workload.unit)
            no_advice: Any = SimpleNamespace(observe=lambda metrics, step: ())
            cluster = Cluster(
                args=args,
                run=run,
                schedule=RolloutSchedule(
                    args, point.rollout_id, facts.num_rollout, facts.num_rollout_per_epoch
                ),
                rollout=rollout,
                trainer=Trainer(
                    args=args,
                    run=run,
                    group=trainer,
                    residency=residency,
                    timeline=timeline,
                    recovery=recovery,
                    replay=replay,
                    weight_push=push,
                    saver=saver,
                ),
                log=RunLog(metrics, no_advice),
                timeline=timeline,
                requests=Requests(None),
                restored=point.restored,
            )
            yield cluster
            if saver is not None:
                recovery.run(cluster.schedule.num_rollout, saver.finish, wait=True)

    def _modelled_fleet(self) -> ModelledFleet:
        costs, clock, work = self.costs, self.clock, self.workload
        left: dict[str, float] = {}
        names = (f"modelled-engine-{i}" for i in range(costs.num_engines))
        engines = [ModelledEngine(clock, costs.engine, work.lengths, name, work.unit, left) for name in names]
        return ModelledFleet(clock, engines, costs.pause_s, costs.swap_s)

    def _recovery(
        self,
        args: Args,
        point: ResumePoint,
        trainer: ModelledTrainGroup,
        residency: Residency,
        push: WeightPush,
        manager: RolloutManager,
    ) -> tuple[Recovery, ReplayLog]:
        """Build the real restart of a lost trainer, as `slime.cluster.parts` does."""
        replay = ReplayLog(
            SafeState(args, None, point.rollout_id - 1),
            KeptBatches(manager.made_batch if self.keeps else None),
            is_on=args.max_restarts > 0,
        )

        def restore(state: SafeState) -> None:
            trainer.rank.wake()
            residency.enter(TRAIN)
            self.clock.run(asyncio.sleep(self.workload.faults.run_restart_s / 2))
            push.open_senders()
            for memory in state.memories:
                trainer.rank.remember(memory)

        failure: concurrent.futures.Future[None] = concurrent.futures.Future()  # no process ever hangs
        never_silent: Any = SimpleNamespace(failure=failure, forget_failure=lambda: None)
        recovery = Recovery(
            args.max_restarts,
            ModelledProcesses(trainer),  # type: ignore[arg-type]
            never_silent,
            replay,
            restore,
            lambda restart: None,
        )
        return recovery, replay

    def _servers(self) -> dict[str, Any]:
        """Addresses of engines outlive them: who asks while a run is down is refused."""

        async def answer(origin: str, *request: Any) -> Any:
            if self._fleet is None:
                raise ConnectionRefusedError(f"{origin} is down")
            return await self._fleet.servers[origin](*request)

        origins = [ROUTER, *(f"http://modelled-engine-{i}:1" for i in range(self.costs.num_engines))]
        return {origin: functools.partial(answer, origin) for origin in origins}

    def _account(self, fleet: ModelledFleet, trainer: ModelledTrainGroup, began: float) -> None:
        measured, passed = self.measured, self.clock.now - began
        self._fleet_s += passed * len(fleet.engines)
        busy = sum(engine.busy_s for engine in fleet.engines)
        measured.engine_busy += busy  # converted to shares when the run is over
        measured.engine_running += sum(engine.running_s for engine in fleet.engines)
        measured.engine_tokens += sum(engine.tokens for engine in fleet.engines)
        measured.train_s += trainer.busy_s
        measured.trained_tokens += trainer.tokens - trainer.num_samples * self.workload.prompt_tokens

    def shares(self) -> Measured:
        """Convert the sums over all starts to shares of the run's time."""
        measured = self.measured
        measured.engine_running /= max(measured.engine_busy, 1e-9)
        measured.engine_busy /= max(self._fleet_s, 1e-9)
        measured.trainer_busy = measured.train_s / max(measured.wall_s, 1e-9)
        return measured


@contextlib.contextmanager
def _plug_ins(workload: work.Workload) -> Iterator[None]:
    """Install the workload's prompts and rewards, which need no tokenizer."""
    before = generation_state.load_tokenizer
    generation_state.load_tokenizer = lambda *_: None  # type: ignore[assignment]
    work.use(workload)
    try:
        yield
    finally:
        generation_state.load_tokenizer = before
        work.use(None)
        fully_async_rollout._workers.clear()


def _fast_folder() -> str | None:
    """Return a folder in memory, if the machine has one: nothing of a simulation is kept."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 1 << 28 else None
