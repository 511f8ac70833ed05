"""Who holds the device now: engines while generating, the trainer while training, both sides' weights in between."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Protocol

from slime.arguments import Args


class Phase(enum.Enum):
    """GENERATE: engine weights and KV. TRAIN: parameters and optimizer. SYNC: weights of both sides, nothing else."""

    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"


GENERATE, TRAIN, SYNC = Phase

_ENGINE_HOLDS = {
    GENERATE: frozenset({"weights", "kv_cache", "cuda_graph"}),
    TRAIN: frozenset(),
    SYNC: frozenset({"weights"}),
}


class Engines(Protocol):
    """The rollout stage, as far as memory is concerned."""

    def release(self, tags: frozenset[str]) -> None: ...

    def restore(self, tags: frozenset[str]) -> None: ...


class Trainer(Protocol):
    """The training stage, as far as memory is concerned."""

    def move(self, *, params: str, optimizer: str) -> None: ...


class Residency:
    """Moves things so that the next phase fits. What leaves goes first, then what comes."""

    def __init__(self, args: Args, engines: Engines, trainer: Trainer):
        self._offload_rollout, self._offload_train = bool(args.offload_rollout), bool(args.offload_train)
        self._engines, self._trainer = engines, trainer
        self._held = _ENGINE_HOLDS[GENERATE]  # engines start with everything in place
        self._phase: Phase | None = None

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        self.enter(phase)
        yield

    def enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        if self._offload_rollout:
            self._release(self._held - _ENGINE_HOLDS[phase])
        if self._offload_train:
            self._trainer.move(
                params="cpu" if phase is GENERATE else "device", optimizer="device" if phase is TRAIN else "cpu"
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
