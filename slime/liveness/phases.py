"""Names what a run is doing: each part of its work is in the wait table while it lasts.

The parts of its start are logged when they end, as records with a `phase` (`Ended`).
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slime.liveness import waits

START, RUN = "start of the run", "run"  # owners in the wait table
PAUSED = "paused"  # between two steps, until somebody resumes the run
CHECKS, FIRST_PUSH = "checks", "first push"  # the first and the last part of a start

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Ended:
    """A part of the start that is done. The part sets `note`; `total`: the steps of the whole run; `cost`:
    what the run is expected to need.

    Example: Ended("data", 0.3, "48 prompts", 15).
    """

    name: str
    seconds: float = 0.0
    note: str = ""
    total: int | None = None
    cost: tuple[str, ...] = ()


@contextlib.contextmanager
def starting(name: str) -> Iterator[Ended]:
    """Mark a part of the start of a run, and log it when it has ended."""
    ended = Ended(name)
    with waits.waiting(name, owner=START) as wait:
        yield ended
    ended.seconds = wait.age_s
    note = f" ({ended.note})" if ended.note else ""
    logger.info("started: %s%s in %.1f s", name, note, ended.seconds, extra={"phase": ended})


def doing(name: str) -> contextlib.AbstractContextManager[waits.Wait]:
    """Mark a part of a step."""
    return waits.waiting(name, owner=RUN)


def active() -> list[waits.Wait]:
    """Return what this process is doing now, oldest first."""
    return [wait for wait in waits.active() if wait.owner in (START, RUN)]
