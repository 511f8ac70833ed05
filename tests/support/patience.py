"""How tests wait: for an event, and so long that only a hang ends it, however busy the machine is."""

import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 600.0
LONG_S = 60.0  # what ends at once has ended by then, even on a busy machine


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return value


def longer_each_time(first_s: float) -> Iterator[float]:
    """Deadlines for a test of what a deadline leaves behind: on a machine that stutters, a later one does."""
    seconds = first_s
    while seconds < PATIENCE_S:
        yield seconds
        seconds *= 4
