"""A modelled trainer: accepts the batches, pushes and checkpoints of a run, with times from a cost model."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from typing import Any

import torch

from slime.arguments import Args
from slime.backends.base import Layout
from slime.batch.flops import sample_sizes
from slime.batch.split import split_for_ranks
from slime.cluster.checkpoints.checkpoint import files_of_rank
from slime.cluster.training.train_actor import Memory, RankNotes
from slime.cluster.training.train_group import Ranks, RankState, TrainGroup
from slime.runtime.base import Future
from slime.simulation.clock import Clock, ModelledHandle
from slime.simulation.costs import TrainerCost
from slime.step.agreement import Agreement
from slime.step.step_report import StepReport
from slime.utils.errors import WorkerDied
from slime.utils.files.checksums import FileRecord, record_files
from slime.utils.types import RolloutBatch
from slime.weight_sync.base import WeightBundle


class ModelledRank:
    """Modelled trainer rank with the methods of `slime.cluster.training.train_actor.TrainActor`."""

    def __init__(self, clock: Clock, costs: TrainerCost):
        self._clock, self._costs, self._saved_in = clock, costs, Path()
        self._death: asyncio.Future[None] = clock.loop.create_future()
        self.version: int | None = None  # weight version, as engines will know it

    async def work(self, seconds: float) -> None:
        """Let the time of the work pass; WorkerDied if the rank is killed in between."""
        if not self._death.done():
            await asyncio.wait([self._death], timeout=seconds)
        if self._death.done():
            raise self.dead()

    @property
    def is_dead(self) -> bool:
        return self._death.done()

    @staticmethod
    def dead() -> WorkerDied:
        return WorkerDied("trainer-0 was killed by signal 9 (an injected fault)")

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def wake(self) -> None:
        """Replace the process; the new one knows nothing until `remember`."""
        self._death, self.version = self._clock.loop.create_future(), None

    def memory(self) -> Memory:
        return Memory(self.version, Agreement())

    def remember(self, memory: Memory) -> None:
        self.version = memory.version

    def note_version(self, number: int) -> None:
        self.version = number

    def drain_peak_memory(self) -> None:
        return None

    def drain_notes(self) -> RankNotes:
        return RankNotes()

    def open_sender(self, transport: str, engine_urls: tuple[str, ...]) -> None: ...

    def close(self) -> None: ...

    async def move(self, *, params: str, optimizer: str) -> None:
        await self.work(self._costs.swap_s / 2)

    async def export(self, version: str, dtype: str | None) -> WeightBundle:
        await self.work(self._costs.push_s)
        self.version = int(version.rpartition(":")[2])
        return WeightBundle(version, "disk", 1, 1, None, None)

    async def save(self, path: Path) -> None:
        self._saved_in = path.parent
        await self.work(self._costs.save_s)
        path.mkdir(parents=True)
        (path / "modelled").write_text("weights")

    def finish_save(self, *, wait: bool) -> dict[str, FileRecord]:
        return record_files(self._saved_in, files_of_rank(self._saved_in, 0, 1))


class _RankHandle(ModelledHandle[ModelledRank]):
    """Handle of a modelled rank; a call to a dead rank fails at once."""

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        if not self._target.is_dead:
            return super().send(lane, method, args, kwargs)
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(self._target.dead())
        return failed


class ModelledProcesses:
    """Replaces `slime.cluster.training.train_group.RankProcesses` for the modelled rank."""

    def __init__(self, trainer: ModelledTrainGroup):
        self._trainer = trainer

    @property
    def lost(self) -> str | None:
        return self._trainer.state.lost

    def find_lost(self) -> list[WorkerDied]:
        return [self._trainer.rank.dead()] if self._trainer.rank.is_dead else []

    def lose(self, cause: str) -> None:
        self._trainer.state.lost = cause

    def find(self) -> None:
        self._trainer.state.lost = None


class ModelledTrainGroup(TrainGroup):
    """Splits batches over ranks like a real run; a step lasts as long as the busiest rank's."""

    def __init__(self, args: Args, clock: Clock, costs: TrainerCost, unit: int):
        self.rank = ModelledRank(clock, costs)
        handle = _RankHandle(clock, self.rank, "trainer-0")
        self._args, self._clock, self._costs, self._unit = args, clock, costs, unit
        self.state = RankState()
        self.ranks = Ranks([handle], self.state)  # type: ignore[list-item]
        self._layouts = [Layout(dp_size=costs.dp_size)]
        self.busy_s = self.tokens = 0.0
        self.num_samples = 0

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> StepReport:
        if batch is None:
            return StepReport({}, [], [])
        shares = split_for_ranks(self._args, batch, self._costs.dp_size)
        lengths = [[size * self._unit for size in sample_sizes(share.batch)] for share in shares]
        seconds = self._costs.step_s(lengths)
        self._clock.run(self.rank.work(seconds))
        self.busy_s += seconds
        self.tokens += sum(map(sum, lengths))
        self.num_samples += sum(map(len, lengths))
        ages = _ages(batch, self.rank.version)
        if self.rank.version is not None:
            self.rank.version += 1
        return StepReport(ages, [], [])


def _ages(batch: RolloutBatch, version: int | None) -> dict[str, float]:
    """Return the share of trained tokens by their age in weight versions."""
    if version is None or "versions" not in batch:
        return {}
    found = torch.cat([versions.long() for versions in batch["versions"]])
    counts = torch.bincount((version - found[found >= 0]).clamp(min=0))
    total = max(1, int(counts.sum()))
    return {f"train/staleness/lag_{age}": float(n) / total for age, n in enumerate(counts.tolist()) if n}
