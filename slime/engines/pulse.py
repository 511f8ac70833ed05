"""Signs of life of engines: whether anything answers at their address, whatever they compute.

A byte of an HTTP answer is all that is asked for. It comes from the thread that accepts requests, so a long
prefill, a compilation or a queue of thousands delays nothing, and no token is made for it. Questions go out
from a thread with a loop of its own: code of the user's that blocks the driver's must not make engines look
dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from slime.observability.wait_table import SIGN_OF_LIFE
from slime.utils import waits
from slime.utils.machine.vital_signs import Signs, SilenceClock

_ROUNDS = 4  # questions within the limit
ENGINE_PATH = "/model_info"  # SGLang answers `/health` with a generation


class Patient(Protocol):
    """Who is asked. `signs`: what the system says of its processes; None: they cannot be seen from here."""

    @property
    def url(self) -> str: ...
    def signs(self) -> Signs | None: ...


class PulseWatch:
    """Asks all of `patients` again and again; `on_silent` is told who has been silent for too long, and why.

    `is_watched` says of a place whether its silence counts now: one that
    is being started is somebody else's care.
    """

    def __init__(
        self,
        patients: Sequence[Patient],
        limit_s: float,
        *,
        path: str = ENGINE_PATH,
        is_watched: Callable[[int], bool],
        on_silent: Callable[[int, str], None],
    ):
        self._patients, self._path, self._is_watched, self._on_silent = patients, path, is_watched, on_silent
        self._pause_s = limit_s / _ROUNDS
        self._clocks = [SilenceClock(limit_s, 2 * self._pause_s) for _ in patients]
        self._stopping = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="engine-pulse", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        for place in range(len(self._patients)):
            waits.mark((self, place), None)

    def _run(self) -> None:
        last = time.monotonic()
        with asyncio.Runner() as runner:
            while not self._stopping.is_set():
                asked = time.monotonic()
                answered = runner.run(
                    self._ask([p for p in range(len(self._patients)) if self._is_watched(p)])
                )
                now = time.monotonic()
                self._judge(answered, now - last)
                last = now
                self._stopping.wait(
                    max(0.0, self._pause_s - (now - asked))
                )  # silence has taken its time already

    async def _ask(self, places: list[int]) -> dict[int, bool]:
        urls = [self._patients[place].url for place in places]
        found = await asyncio.gather(*(answers(url, self._path, self._pause_s) for url in urls))
        return dict(zip(places, found, strict=True))

    def _judge(self, answered: dict[int, bool], elapsed_s: float) -> None:
        for place, clock in enumerate(self._clocks):
            # Once more: who was stopped or put to sleep meanwhile owed no answer.
            if answered.get(place, True) or not self._is_watched(place):
                clock.hear()
                waits.mark((self, place), None)
                continue
            clock.miss(elapsed_s, self._patients[place].signs())
            self._mark(place, clock)
            if clock.is_overdue and not self._stopping.is_set():
                why = f"no sign of life for {clock.silent_s:.0f} s: {clock.describe()}"
                clock.hear()
                self._on_silent(place, why)

    def _mark(self, place: int, clock: SilenceClock) -> None:
        """Enters the engine in the table of waits until it answers or is replaced."""
        what = f"{SIGN_OF_LIFE} ({clock.describe()})"
        started, name = time.monotonic() - clock.silent_s, waits.known_as(self._patients[place].url)
        waits.mark((self, place), waits.Wait(what, "the watch", started, clock.allowed_s, name))


async def answers(url: str, path: str, timeout_s: float) -> bool:
    """Whether anything comes back, be it an error."""
    parts = urlsplit(url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            return bool(await reader.read(1))
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
