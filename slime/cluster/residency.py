"""Who holds the device now: engines while generating, the trainer while
training, both sides' weights in between.

How full the device was is asked of the trainer's ranks, which see what engines on the same device hold too.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Protocol

from slime.arguments import Args


class Phase(enum.Enum):
    """GENERATE: engine weights and KV. TRAIN: parameters and optimizer.
    SYNC: weights of both sides, nothing else.
    """

    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"


GENERATE, TRAIN, SYNC = Phase

_ENGINE_HOLDS = {
    GENERATE: frozenset({"weights", "kv_cache", "cuda_graph"}),
    TRAIN: frozenset(),
    SYNC: frozenset({"weights"}),
}


# What a phase is called where its memory is reported. "offload": engines
# have left and the trainer has not come.
_REPORTED = {GENERATE: "rollout", TRAIN: "train", SYNC: "push"}
_OFFLOAD = "offload"


class Engines(Protocol):
    """The rollout stage, as far as memory is concerned."""

    def release(self, tags: frozenset[str]) -> None: ...

    def restore(self, tags: frozenset[str]) -> None: ...


class Trainer(Protocol):
    """The training stage, as far as memory is concerned."""

    def move(self, *, params: str, optimizer: str) -> None: ...

    def take_peak_memory(self) -> int | None: ...


class Residency:
    """Moves things so that the next phase fits. What leaves goes first, then what comes."""

    def __init__(self, args: Args, engines: Engines, trainer: Trainer):
        self._offload_rollout, self._offload_train = bool(args.offload_rollout), bool(args.offload_train)
        self._engines, self._trainer = engines, trainer
        self._held = _ENGINE_HOLDS[GENERATE]  # engines start with everything in place
        self._phase: Phase | None = None
        self._peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        self.enter(phase)
        self._trainer.take_peak_memory()  # what the phase before held until it left is not this one's
        yield
        self._note_peak(_REPORTED[phase])

    def make_room(self) -> None:
        """Before a trainer starts on the engines' devices: they keep their weights alone."""
        if self._offload_rollout:
            self._release(self._held - _ENGINE_HOLDS[SYNC])

    def take_peaks(self) -> dict[str, float]:
        """GiB in use at most in each phase since the last call; empty on a CPU machine."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _note_peak(self, name: str) -> None:
        peak = self._trainer.take_peak_memory()
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
            self._trainer.move(
                params="cpu" if phase is GENERATE else "device",
                optimizer="device" if phase is TRAIN else "cpu",
            )
        if self._offload_rollout:
            self._restore(_ENGINE_HOLDS[phase] - self._held)
        self._phase = phase

    def _release(self, tags: frozenset[str]) -> None:
        if tags:
            self._engines.release(tags)
            self._held -= tags

    def _restore(self, tags: frozenset[str]) -> None:
        if tags:
            self._engines.restore(tags)
            self._held |= tags
