"""Hands a shared device over between engines (generation), trainer (training) and both (weight sync).

Peak memory is read from the trainer's ranks, whose view of the device includes the engines' memory.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from slime.arguments import Args
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import Ranks
from slime.runtime.base import Handle
from slime.utils.errors import WorkerDied
from slime.wire.control import Tag

_MEMORY_DEADLINE_S = 600.0


class Phase(enum.Enum):
    """Phases of a shared device, named by what it holds."""

    GENERATE = "generate"  # engine weights and KV cache
    TRAIN = "train"  # parameters and optimizer
    SYNC = "sync"  # weights of both sides, nothing else


GENERATE, TRAIN, SYNC = Phase

_ENGINE_HOLDS: dict[Phase, frozenset[Tag]] = {
    GENERATE: frozenset({"weights", "kv_cache", "cuda_graph"}),
    TRAIN: frozenset(),
    SYNC: frozenset({"weights"}),
}

# How a phase is called where its memory is reported. "offload": engines have left, the trainer has not come.
_REPORTED = {GENERATE: "rollout", TRAIN: "train", SYNC: "push"}
_OFFLOAD = "offload"


class Residency:
    """Moves weights, caches and optimizer state so that the next phase fits: first offloads, then loads."""

    def __init__(self, args: Args, engines: Handle[EngineWeights], ranks: Ranks[TrainActor]):
        self._offload_rollout, self._offload_train = bool(args.offload_rollout), bool(args.offload_train)
        self._engines, self._ranks = engines, ranks
        self._held = _ENGINE_HOLDS[GENERATE]  # engines start with everything in place
        self._phase: Phase | None = None
        self._peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        self.enter(phase)
        self._drain_peak()  # what the phase before held until it left is not this one's
        yield
        self._note_peak(_REPORTED[phase])

    @contextlib.contextmanager
    def with_parameters(self) -> Iterator[None]:
        """Keep the trainer's parameters on the device within the block, also while engines generate."""
        away = self._offload_train and self._phase is GENERATE
        if away:
            self._ranks.call(TrainActor.move, params="device", optimizer="cpu")
        yield
        if away:
            self._ranks.call(TrainActor.move, params="cpu", optimizer="cpu")

    def make_room(self) -> None:
        """Reduce the engines to their weights, before a trainer starts on their devices."""
        if self._offload_rollout:
            self._release(self._held - _ENGINE_HOLDS[SYNC])

    def drain_peaks(self) -> dict[str, float]:
        """Return the peak GiB of each phase since the last call; empty on a CPU machine."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _drain_peak(self) -> int | None:
        """Return the peak memory of the fullest device since the last call; None on a CPU machine."""
        with contextlib.suppress(WorkerDied):  # reported to whoever needs the rank
            found = self._ranks.call(TrainActor.drain_peak_memory)
            return max((peak for peak in found if peak is not None), default=None)
        return None

    def _note_peak(self, name: str) -> None:
        peak = self._drain_peak()
        if peak is not None:
            metric = f"perf/peak_memory_{name}_gib"
            self._peaks[metric] = max(peak / 2**30, self._peaks.get(metric, 0.0))

    def enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        if self._offload_rollout:
            self._release(self._held - _ENGINE_HOLDS[phase])
            if phase is TRAIN:
                self._note_peak(_OFFLOAD)
        if self._offload_train:
            self._ranks.call(
                TrainActor.move,
                params="cpu" if phase is GENERATE else "device",
                optimizer="device" if phase is TRAIN else "cpu",
            )
        elif self._offload_rollout and self._phase is TRAIN:
            self._ranks.call(TrainActor.empty_cache)  # what a step needed; weights and moments stay
        if self._offload_rollout:
            self._restore(_ENGINE_HOLDS[phase] - self._held)
        self._phase = phase

    def _release(self, tags: frozenset[Tag]) -> None:
        if tags:
            self._engines.call_control(EngineWeights.release, tags).result(_MEMORY_DEADLINE_S)
            self._held -= tags

    def _restore(self, tags: frozenset[Tag]) -> None:
        if tags:
            self._engines.call_control(EngineWeights.restore, tags).result(_MEMORY_DEADLINE_S)
            self._held |= tags
