"""Work that a lost trainer does not end: its ranks are replaced, and the work is begun again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from slime.cluster.restart.faults import cause_of
from slime.cluster.restart.redo import Redo, SafeState, UnreadableState
from slime.cluster.training.train_group import RankProcesses, TrainerLost
from slime.observability import phases
from slime.runtime.base import Future, Guarded, R, Runtime
from slime.utils.errors import RunStopped

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Example: Restart(4, "trainer-0 was killed by signal 9", "its state after step 3", 1)."""

    rollout_id: int
    cause: str
    begins_from: str
    number: int  # since the run started


@dataclass(slots=True)
class _Budget:
    """`limit`: restarts without a new step in between."""

    limit: int
    causes: list[str] = field(default_factory=list)  # since the last new step
    furthest: int = -1  # the last rollout that was trained

    def spend(self, rollout_id: int, cause: str, error: Exception) -> None:
        self.causes.append(f"step {rollout_id + 1}: {cause}")
        if len(self.causes) > self.limit:
            chain = "; then ".join(self.causes)
            raise RunStopped(
                f"the trainer was lost {len(self.causes)} times and made no new step in between "
                f"(--max-restarts {self.limit}): {chain}"
            ) from error

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next restart; none before the first."""
        again = len(self.causes) - 1
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (again - 1)) if again > 0 else 0.0


class Recovery:
    """`restore`: replaces the ranks and loads a state. `tell`: keeps the reason where people look for it.

    With a limit of 0 every loss ends the run.
    """

    def __init__(
        self,
        limit: int,
        ranks: RankProcesses,
        runtime: Runtime,
        redo: Redo,
        restore: Callable[[SafeState], None],
        tell: Callable[[Restart], None],
    ):
        self._ranks, self._runtime, self._redo = ranks, runtime, redo
        self._restore, self._tell = restore, tell
        self._budget = _Budget(limit)
        self.num_restarts = 0
        self.cause = ""  # of the last loss

    @property
    def is_on(self) -> bool:
        return self._budget.limit > 0

    def run(self, work: Callable[[], R], rollout_id: int) -> R:
        """What `work` returns, with whatever processes the trainer has by then. It must bear a repetition."""
        while True:
            try:
                self._come_back()
                return work()
            except TrainerLost:
                if not self.is_on:
                    raise
            except Exception as error:
                self.take_loss(error, rollout_id)

    def survive(self, future: Future[R], rollout_id: int) -> Surviving[R]:
        return Surviving(future, self, rollout_id)

    def watched(self, future: Future[R]) -> Future[R]:
        """It also ends when a process is found to be silent."""
        return Guarded(future, self._runtime.failure)

    def look(self, rollout_id: int) -> None:
        """Whether a process was lost while nobody waits for one."""
        if self._runtime.failure.done():
            try:
                self._runtime.failure.result()
            except Exception as error:
                self.take_loss(error, rollout_id)

    def trained(self, rollout_id: int) -> None:
        """A step that was never taken before is progress: earlier losses are paid for."""
        if rollout_id > self._budget.furthest:
            self._budget.furthest = rollout_id
            self._budget.causes.clear()

    def take_loss(self, error: Exception, rollout_id: int) -> None:
        """Raises the error, unless it is that of a lost rank and restarts are left."""
        if not self.is_on or self._ranks.lost is not None:
            raise error
        cause = cause_of(error, self._ranks)
        if cause is None:
            raise error
        self.cause = cause
        self._ranks.lose(cause)
        self._runtime.forget_failure()
        self._budget.spend(rollout_id, cause, error)
        self.num_restarts += 1
        begins_from = str(self._redo.safe)
        logger.error(
            "the trainer is lost at step %d: %s; it starts again from %s (restart %d, %d of --max-restarts "
            "%d without a new step)",
            *(rollout_id + 1, cause, begins_from, self.num_restarts),
            *(len(self._budget.causes), self._budget.limit),
        )
        self._tell(Restart(rollout_id, cause, begins_from, self.num_restarts))

    def _come_back(self) -> None:
        if self._ranks.lost is None:
            return
        with phases.doing("restarting the trainer"):
            time.sleep(self._budget.pause_s)
            started = time.monotonic()
            self._restore_safe()
            self._redo.run()
        logger.info("the trainer is back where it was (%.1f s)", time.monotonic() - started)

    def _restore_safe(self) -> None:
        """Go back to the newest state that can be read."""
        while True:
            self._ranks.find()
            try:
                return self._restore(self._redo.safe)
            except UnreadableState as error:
                damaged, older = str(self._redo.safe), self._redo.fall_back()
                if older is None:
                    raise RunStopped(
                        f"the trainer was lost ({self.cause}) and cannot begin from {damaged}: {error}; "
                        "this command, started again, takes the checkpoint before it."
                    ) from error
                logger.error(
                    "%s cannot be read (%s): the trainer starts from %s instead", damaged, error, older
                )
                self._ranks.end()


class Surviving(Generic[R]):
    """The answer of another process than the trainer's, which a lost rank does not end: ranks can wait."""

    def __init__(self, inner: Future[R], recovery: Recovery, rollout_id: int):
        self._inner, self._recovery, self._rollout_id = inner, recovery, rollout_id

    def done(self) -> bool:
        return self._inner.done()

    def result(self, deadline_s: float | None = None, /) -> R:
        while True:
            try:
                return self._recovery.watched(self._inner).result(deadline_s)
            except Exception as error:
                self._recovery.take_loss(error, self._rollout_id)
