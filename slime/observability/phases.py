"""What a run is doing: each part of its work stands in the table of waits while it lasts.

The parts of its start are logged when they end. Whoever shows a run reads the table (`active`) and the log
records that have a `phase` (`Ended`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slime.utils import waits

_START, RUN = "start of the run", "run"
PAUSED = "paused"  # between two steps, until somebody resumes the run
CHECKS, FIRST_PUSH = "checks", "first push"  # the first and the last part of a start

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Ended:
    """A part of the start that is done. Who did it sets `note`, `total`, the steps of the whole run, and
    `cost`, what the run is expected to need.

    Example: Ended("data", 0.3, "48 prompts", 15).
    """

    name: str
    seconds: float = 0.0
    note: str = ""
    total: int | None = None
    cost: tuple[str, ...] = ()


@contextlib.contextmanager
def starting(name: str) -> Iterator[Ended]:
    """A part of the start of a run: told when it has ended."""
    ended = Ended(name)
    with waits.waiting(name, owner=_START) as wait:
        yield ended
    ended.seconds = wait.age_s
    note = f" ({ended.note})" if ended.note else ""
    logger.info("started: %s%s in %.1f s", name, note, ended.seconds, extra={"phase": ended})


def doing(name: str) -> contextlib.AbstractContextManager[waits.Wait]:
    """A part of every step."""
    return waits.waiting(name, owner=RUN)


def active() -> list[waits.Wait]:
    """What is being done now, in this process; oldest first."""
    return [wait for wait in waits.active() if wait.owner in (_START, RUN)]


def is_part_of_a_step(wait: waits.Wait) -> bool:
    return wait.owner == RUN
