"""The rollout stage as the driver sees it, and the stand-ins for a stage that a debugging run leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.run import Run
from slime.runtime.base import CONTROL, Future, Guarded, Runtime, WorkerSpec
from slime.runtime.placement import Placement
from slime.step.metrics import StepReport
from slime.utils.checksums import FileRecord, find_damage
from slime.utils.types import RolloutBatch
from slime.weight_sync import LiveReport, Parcel, Target

_MEMORY_DEADLINE_S = 600.0


class RolloutStage:
    """Calls the rollout manager, wherever it lives."""

    def __init__(self, args: Args, run: Run, runtime: Runtime, placement: Placement):
        spec = WorkerSpec(name="rollout", near_driver=True)
        self._handle = runtime.spawn(RolloutManager, args, run, placement, runtime, spec=spec)
        self._failure = runtime.failure

    def begin_start(self, start_rollout_id: int, rollout_state: dict[str, Any] | None) -> Future:
        """Its result is a RolloutFacts."""
        return self._handle.call("start", start_rollout_id, rollout_state)

    def generate(self, rollout_id: int) -> Generated:
        return self.begin_generate(rollout_id).result()

    def begin_generate(self, rollout_id: int) -> Future:
        """Ends early when a trainer rank is lost, which nobody waits for meanwhile."""
        return Guarded(self._handle.call("generate", rollout_id), self._failure)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return Guarded(self._handle.call("evaluate", rollout_id), self._failure).result()

    def receive(self, parcel: Parcel) -> dict[str, float]:
        return self._handle.call("receive", parcel, lane=CONTROL).result()

    def begin_live(self) -> tuple[Target, ...]:
        return self._handle.call("begin_live", lane=CONTROL).result()

    def finish_live(self, version: str, targets: tuple[Target, ...], report: LiveReport) -> dict[str, float]:
        return self._handle.call("finish_live", version, targets, report, lane=CONTROL).result()

    def release(self, tags: frozenset[str]) -> None:
        self._handle.call("release", tags, lane=CONTROL).result(_MEMORY_DEADLINE_S)

    def restore(self, tags: frozenset[str]) -> None:
        self._handle.call("restore", tags, lane=CONTROL).result(_MEMORY_DEADLINE_S)

    def save_data_source(self, rollout_id: int) -> None:
        self._handle.call("save_data_source", rollout_id, lane=CONTROL).result()

    def close(self) -> None:
        self._handle.call("close", lane=CONTROL).result(60.0)


class NoTrainer:
    """`--debug-rollout-only`: rollouts are made and nothing learns from them."""

    def start(self, checkpoint: Path | None) -> None:
        """Nothing to start."""

    def describe_start(self) -> str:
        return "no trainer"

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> StepReport:
        return StepReport({}, [], [])

    def move(self, *, params: str, optimizer: str) -> None:
        """Nothing to move."""

    def take_peak_memory(self) -> None:
        """Nobody here holds a device."""

    def save(self, path: Path) -> None:
        """Nothing to save."""

    def finish_save(self, *, wait: bool) -> dict[str, FileRecord] | None:
        return {}

    def find_damage(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Of the files that a run without a trainer reads."""
        return find_damage(folder, {name: record for name, record in files.items() if "/" not in name})

    def save_hf(self, path: Path) -> None:
        """Nothing to save."""

    def close(self) -> None:
        """Nothing runs."""
