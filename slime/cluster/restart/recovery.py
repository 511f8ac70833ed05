"""Retries operations of the trainer after the loss of a rank, once its ranks are replaced."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import torch.distributed as dist

from slime.cluster.restart.replay import ReplayLog, SafeState, UnreadableState
from slime.cluster.training.train_group import RankProcesses, TrainerLost
from slime.liveness import phases
from slime.runtime.base import Future, P, R, Runtime, result_or_failure
from slime.utils.errors import RunStopped

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0

# How gloo and NCCL report that the other side has gone or hangs, and CUDA that a device failed.
_SIGNS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout"
    r"|timeout caused pair closure|NCCL (?:error|timeout)|ncclRemoteError|ncclSystemError"
    r"|uncorrectable ECC|CUDA error: (?:unspecified launch failure|an illegal memory access|unknown error)"
)


@dataclass(slots=True)
class _Budget:
    """Counts restarts of the trainer. `limit`: restarts without a new step in between."""

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
    """Replaces lost ranks. `restore` starts new ranks with a state, `report` makes the restart known.

    With a limit of 0 every loss ends the run.
    """

    def __init__(
        self,
        limit: int,
        ranks: RankProcesses,
        runtime: Runtime,
        replay: ReplayLog,
        restore: Callable[[SafeState], None],
        report: Callable[[dict[str, Any]], None],
    ):
        self._ranks, self._runtime, self._replay = ranks, runtime, replay
        self._restore, self._report = restore, report
        self._budget = _Budget(limit)
        self.num_restarts = 0
        self.cause = ""  # of the last loss

    @property
    def failure(self) -> concurrent.futures.Future[None]:
        """Receives the error of a process that is lost or silent."""
        return self._runtime.failure

    @property
    def is_on(self) -> bool:
        return self._budget.limit > 0

    def run(self, rollout_id: int, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `work(...)`, called again with new ranks where some are lost: it must be repeatable."""
        while True:
            try:
                self._bring_back()
                return work(*args, **kwargs)
            except TrainerLost:
                if not self.is_on:
                    raise
            except Exception as error:
                self.handle_loss(error, rollout_id)

    def check(self, rollout_id: int) -> None:
        """Notice a process that was lost while nobody waits for one."""
        error = self.failure.exception() if self.failure.done() else None
        if isinstance(error, Exception):
            self.handle_loss(error, rollout_id)

    def note_trained(self, rollout_id: int) -> None:
        """Reset the budget at a step that was never taken before: that is progress."""
        if rollout_id > self._budget.furthest:
            self._budget.furthest = rollout_id
            self._budget.causes.clear()

    def handle_loss(self, error: Exception, rollout_id: int) -> None:
        """Mark the trainer as lost; raises `error` unless a lost rank caused it and restarts are left."""
        cause = cause_of(error, self._ranks) if self.is_on and self._ranks.lost is None else None
        if cause is None:
            raise error
        self.cause = cause
        self._ranks.lose(cause)
        self._runtime.forget_failure()
        self._budget.spend(rollout_id, cause, error)
        self.num_restarts += 1
        begins_from = str(self._replay.safe)
        logger.error(
            "The trainer was lost at step %d: %s. It restarts from %s (restart %d; %d of --max-restarts %d "
            "without a new step).",
            *(rollout_id + 1, cause, begins_from, self.num_restarts),
            *(len(self._budget.causes), self._budget.limit),
        )
        self._report({"step": rollout_id + 1, "cause": cause, "begins_from": begins_from})

    def _bring_back(self) -> None:
        if self._ranks.lost is None:
            return
        with phases.doing("restarting the trainer"):
            time.sleep(self._budget.pause_s)
            started = time.monotonic()
            self._restore_safe()
            self._replay.run()
        logger.info("The trainer has restarted and caught up (%.1f s).", time.monotonic() - started)

    def _restore_safe(self) -> None:
        """Go back to the newest state that can be read."""
        while True:
            self._ranks.find()
            try:
                return self._restore(self._replay.safe)
            except UnreadableState as error:
                damaged, older = str(self._replay.safe), self._replay.fall_back()
                if older is None:
                    raise RunStopped(
                        f"the trainer was lost ({self.cause}) and cannot restart from {damaged}: {error}; "
                        "run this command again: it resumes from the checkpoint before."
                    ) from error
                logger.error(
                    "%s cannot be read (%s): the trainer starts from %s instead", damaged, error, older
                )
                self._ranks.end()


class GuardedFuture(Generic[R]):
    """A result from another process than the trainer's; the loss of a rank does not end the wait for it.

    `meanwhile` is called during the wait, in which the trainer is idle.
    """

    def __init__(
        self,
        inner: Future[R],
        recovery: Recovery,
        rollout_id: int,
        meanwhile: Callable[[], object] = lambda: None,
    ):
        self._inner, self._recovery, self._rollout_id = inner, recovery, rollout_id
        self._meanwhile = meanwhile

    def done(self) -> bool:
        return self._inner.done()

    def result(self, deadline_s: float | None = None, /) -> R:
        assert deadline_s is None, "a rollout may take as long as it needs"
        while True:
            try:
                return result_or_failure(self._inner, self._recovery.failure, self._meanwhile)
            except Exception as error:
                self._recovery.handle_loss(error, self._rollout_id)


def cause_of(error: Exception, ranks: RankProcesses) -> str | None:
    """Return why the trainer is lost, in a sentence; None: it is not, and a restart would fail the same way.

    All ranks are asked, because the error of a survivor may arrive before that of the rank that died. An
    exception of the user's code, or a device that is too small, is no reason for a restart.
    """
    lost = ranks.find_lost()
    if lost:
        return ", ".join(map(headline, lost))
    notes: list[str] = getattr(error, "__notes__", [])  # only there once one is added
    if isinstance(error, dist.DistError) or _SIGNS.search("\n".join([str(error), *notes])):
        return f"the ranks lost each other ({type(error).__name__}: {headline(error)})"
    return None


def headline(error: BaseException) -> str:
    """Return the first line of an error, without the log after it."""
    return str(error).partition("\n")[0].partition("; last lines of")[0][:300]
