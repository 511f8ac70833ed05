"""All engines of one model: started together, watched, restarted when they die, given up when they keep dying."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slime.engines.server import EngineServer
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.wire.control import EngineControl

logger = logging.getLogger(__name__)


class EnginesKeepDying(RunStopped):
    """Too many deaths within the window: restarting again would only hide the cause."""


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """When an engine counts as dead and when the run gives up. `probe_interval_s` None: only its process is watched."""

    restart_limit: int
    restart_window_s: float
    poll_s: float = 0.1
    probe_interval_s: float | None = None
    probe_timeout_s: float = 30.0
    probe_first_wait_s: float = 0.0


class EngineFleet:
    """Owns the servers and the thread that watches them.

    `on_join` is called with the address of an engine that was restarted, before it counts as back: it brings the
    engine to the current weights. `failure` gets the exception that ends the run.
    """

    def __init__(self, servers: list[EngineServer], policy: WatchPolicy, on_join: Callable[[str], None]):
        self._servers, self._policy, self._on_join = servers, policy, on_join
        self._deaths: deque[float] = deque()
        self._eviction: Exception | None = None  # why we last killed an engine ourselves
        self._membership = threading.Lock()  # held by a push or a memory phase: nobody joins meanwhile
        self._stopping = threading.Event()
        self._last_probe = time.monotonic() + policy.probe_first_wait_s
        self.failure: concurrent.futures.Future = concurrent.futures.Future()
        self.num_restarts = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        return tuple(server.pid for server in self._servers)

    def is_alive(self, url: str) -> bool:
        return any(server.url == url and server.alive() for server in self._servers)

    def launch(self) -> None:
        for server in self._servers:
            server.launch()

    def wait_ready(self) -> tuple[str, ...]:
        """Waits for every engine, then begins to watch them."""
        for server in self._servers:
            server.wait_ready()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        return self.urls

    @contextlib.contextmanager
    def frozen(self) -> Iterator[list[str]]:
        """Membership does not change inside; yields the addresses of the engines that are alive."""
        with self._membership:
            yield [server.url for server in self._servers if server.alive()]
            self._last_probe = time.monotonic() + self._policy.probe_first_wait_s

    def evict(self, url: str, cause: Exception) -> None:
        """Kill an engine that misbehaved; the watch brings it back."""
        for server in self._servers:
            if server.url == url:
                logger.error("%s is evicted: %s", server.plan.name, cause)
                self._eviction = cause
                server.kill()

    def stop(self) -> None:
        self._stopping.set()
        for server in self._servers:
            server.stop()

    def _watch(self) -> None:
        while not self._stopping.wait(self._policy.poll_s):
            try:
                with self._membership:
                    self._probe_if_due()
                    for server in self._servers:
                        if not server.alive() and not self._stopping.is_set():
                            self._restart(server)
            except Exception as error:
                if not self._stopping.is_set():
                    self.failure.set_exception(error)
                return

    def _restart(self, server: EngineServer) -> None:
        now = time.monotonic()
        end = server.describe_end()
        self._deaths.append(now)
        while now - self._deaths[0] > self._policy.restart_window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._policy.restart_limit:
            raise EnginesKeepDying(
                f"engines died {len(self._deaths)} times within {self._policy.restart_window_s:.0f} s "
                f"(--engine-restart-limit {self._policy.restart_limit}); the last one, {server.plan.name}, {end}"
            ) from self._eviction
        logger.warning("%s %s\nrestarting it", server.plan.name, end)
        server.launch()
        try:
            server.wait_ready()
            self._on_join(server.url)
        except Exception as error:  # one more death, counted at the next look
            self.evict(server.url, error)
            return
        self.num_restarts += 1
        logger.warning("%s serves again at %s", server.plan.name, server.url)

    def _probe_if_due(self) -> None:
        interval = self._policy.probe_interval_s
        if interval is None or time.monotonic() - self._last_probe < interval:
            return
        for server in self._servers:
            control = EngineControl(server.url)
            if server.alive() and not run(control.healthy(self._policy.probe_timeout_s)):
                self.evict(server.url, TimeoutError(f"no token within {self._policy.probe_timeout_s} s"))
        self._last_probe = time.monotonic()
