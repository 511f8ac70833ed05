"""Named timers: how long each part of a step took, summed per name until collected."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Timer:
    """`with timer("perf/actor_train_time"): ...` adds the elapsed seconds to that name. Nests; thread-safe.

    A timed block counts even when it raises: a step that failed also took its time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def start(self, name: str) -> None:
        """Begin a span that ends elsewhere; use the context manager where one block will do."""
        with self._lock:
            if name in self._started:
                raise ValueError(f"timer {name!r} is already running")
            self._started[name] = time.perf_counter()

    def end(self, name: str) -> float:
        """End the span begun by `start`; returns its seconds."""
        now = time.perf_counter()
        with self._lock:
            if name not in self._started:
                raise ValueError(f"timer {name!r} was never started")
            seconds = now - self._started.pop(name)
        self.add(name, seconds)
        return seconds

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def log_dict(self) -> dict[str, float]:
        """Seconds per name so far, in order of first use."""
        with self._lock:
            return dict(self._seconds)

    def collect(self) -> dict[str, float]:
        """Seconds per name since the last collection, which starts
        anew. Spans still running are not included.
        """
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    reset = collect


timer = Timer()  # of this process, for code that has no step of its own
