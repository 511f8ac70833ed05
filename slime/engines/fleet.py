"""Starts the engines of one model together, watches them, and restarts dead ones up to a limit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime.engines.engine_process import LaunchPlan, MachineLost
from slime.liveness import waits
from slime.liveness.heartbeat import ENGINE_PATH, HeartbeatWatch, HttpBeat
from slime.liveness.vital_signs import Signs
from slime.utils.async_utils import all_or_none, run
from slime.utils.errors import RunStopped
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

logger = logging.getLogger(__name__)
_HEARTBEATS = 4  # heartbeat requests to an engine within its silence limit
_MACHINE_POLL_S = 10.0  # between two attempts to start an engine on a machine that was lost


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """Decides when an engine counts as dead, and when the run gives up. `probe_interval_s` None: no probes.

    `silence_limit_s`: longest time without a heartbeat, see `slime.liveness.heartbeat`; None: no limit.
    `probe_failures`: number of health probes that must fail in a row. `no_engine_timeout_s` None: a run
    without any engine waits until a restart succeeds.
    """

    restart_limit: int
    restart_window_s: float
    poll_s: float = 0.1
    silence_limit_s: float | None = None
    probe_interval_s: float | None = None
    probe_timeout_s: float = 30.0
    probe_first_wait_s: float = 0.0
    probe_failures: int = 1
    no_engine_timeout_s: float | None = None


class FleetServer(Protocol):
    """One engine: a process of ours (`EngineServer`, `HostedEngine`) or another's (`ExternalServer`)."""

    plan: LaunchPlan

    @property
    def url(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def bootstrap_port(self) -> int | None: ...  # of an engine that prefills for others

    def transports(self, info: EngineInfo) -> tuple[str, ...]: ...
    def launch(self) -> object: ...  # MachineLost: not before its machine is back
    def wait_ready(self) -> str: ...
    def alive(self) -> bool: ...
    def signs(self) -> Signs | None: ...  # None: its processes cannot be seen
    def describe_end(self) -> str: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...


class Rotation(Protocol):
    """Spreads requests over engines. `remove` and `add` keep its list of engines current."""

    def add(self, server: FleetServer) -> None: ...
    def remove(self, url: str) -> None: ...


class EngineFleet:
    """Owns the servers and the thread that watches them.

    An engine that died leaves the rotation at once and is restarted while the others keep serving; weight
    pushes go to the engines that serve. `failure` gets the exception that ends the run.
    """

    def __init__(
        self,
        servers: Sequence[FleetServer],
        policy: WatchPolicy,
        *,
        what: str = "engines",
        heartbeat_path: str = ENGINE_PATH,
    ):
        self.servers, self._policy = tuple(servers), policy
        self._what, self._heartbeat_path = what, heartbeat_path
        self._rotation: Rotation | None = None
        self._expected_version: Callable[[], str | None] = lambda: None
        self._bring_up_to_date: Callable[[str], None] = lambda url: None  # all of its files are loaded
        self._has_weights: Callable[[], bool] = lambda: True
        self._out: list[FleetServer] = []  # engines that restart, or wait to be restarted
        self._deaths: deque[float] = deque()
        self._eviction: Exception | None = None  # why the fleet last killed an engine
        self._last_end = ""  # which engine died last, and how
        self._alone_since: float | None = None  # when the last engine was lost
        self._failed_probes: Counter[str] = Counter()  # by address
        self._membership = threading.Lock()  # held by a push or a memory phase: no engine joins meanwhile
        self._stopping = threading.Event()
        # Engines have released their memory: none can generate, and there is no room for a new one.
        self.asleep = False
        self._last_probe = time.monotonic() + policy.probe_first_wait_s
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.num_restarts = 0
        limit_s = policy.silence_limit_s or math.inf
        self._heartbeats: HeartbeatWatch[HttpBeat] = HeartbeatWatch(
            limit_s, self._evict_silent, interval_s=limit_s / _HEARTBEATS, warn_after_s=limit_s
        )

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        return tuple(server.pid for server in self.servers)

    def is_alive(self, url: str) -> bool:
        """Return whether the engine serves now; False while it restarts."""
        return any(server.url == url and self._serves(server) for server in self.servers)

    def _serves(self, server: FleetServer) -> bool:
        return server in self.servers and server not in self._out and server.alive()

    def _owes_heartbeat(self, server: FleetServer) -> bool:
        return self._serves(server) and not self.asleep

    def follow(self, rotation: Rotation) -> None:
        """Keep this rotation informed of engines that leave and return."""
        self._rotation = rotation

    def keep_current(
        self,
        version: Callable[[], str | None],
        bring_up_to_date: Callable[[str], None],
        has_weights: Callable[[], bool] = lambda: True,
    ) -> None:
        """Let probes also check the weights of an engine; `version` returns None: any weights are accepted.

        `bring_up_to_date` is called with the address of a restarted engine, before it joins the rotation and
        as soon as `has_weights` returns that there is something to load.
        """
        self._expected_version, self._bring_up_to_date = version, bring_up_to_date
        self._has_weights = has_weights

    def launch(self) -> None:
        for server in self.servers:
            server.launch()

    def wait_ready(self) -> tuple[str, ...]:
        """Wait until every engine serves, then start to watch them."""
        for server in self.servers:
            server.wait_ready()
            waits.know_as(server.url, server.plan.name)
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        for server in self.servers:
            self._expect_heartbeats(server)
        return self.urls

    def _expect_heartbeats(self, server: FleetServer) -> None:
        if self._policy.silence_limit_s:
            owes = functools.partial(self._owes_heartbeat, server)
            for part in getattr(server, "parts", (server,)):  # of one over several machines
                self._heartbeats.add(HttpBeat(part, owes, self._heartbeat_path))

    def admit(self, server: FleetServer) -> None:
        """Let an engine that is ready join: it gets the current weights, and then requests.

        If these are not written yet, a thread waits for them.
        """
        server.wait_ready()
        waits.know_as(server.url, server.plan.name)
        with self._membership:
            self._out.append(server)
            self.servers = (*self.servers, server)
            has_weights = self._has_weights()
            if has_weights:
                try:
                    self._bring_up_to_date(server.url)
                except BaseException:
                    self._forget(server)
                    raise
                finally:
                    self._out.remove(server)
        self._expect_heartbeats(server)
        if not has_weights:
            name = f"start of {server.plan.name}"
            threading.Thread(target=self._bring_back, args=(server,), name=name, daemon=True).start()
        elif self._rotation is not None:
            self._rotation.add(server)

    def dismiss(self, server: FleetServer) -> None:
        """Let an engine leave: its requests are sent to others, and it ends if it is ours."""
        self._leave_rotation(server)
        with self._membership:
            self._forget(server)
        server.stop()

    def _forget(self, server: FleetServer) -> None:
        self.servers = tuple(other for other in self.servers if other is not server)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[list[str]]:
        """Keep the membership constant within the block; yields the addresses of the current engines."""
        with self._membership:
            yield [server.url for server in self.servers if self._serves(server)]
            self._last_probe = time.monotonic() + self._policy.probe_first_wait_s

    def evict(self, url: str, cause: Exception) -> None:
        """Kill an engine that misbehaved; the watch restarts it."""
        for server in self.servers:
            if server.url == url:
                logger.error("%s is removed from the fleet: %s", server.plan.name, cause)
                self._eviction = cause
                self._leave_rotation(server)
                server.kill()

    def _evict_silent(self, beat: HttpBeat, cause: str) -> None:
        [server] = [server for server in self.servers if beat.server in getattr(server, "parts", (server,))]
        part = "" if beat.server is server else f"{beat.name}: "
        self.evict(server.url, TimeoutError(f"{part}no sign of life for {cause}"))

    def stop(self) -> None:
        self._stopping.set()
        self._heartbeats.close()
        for server in self.servers:
            server.stop()

    # ---- the watch -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(self._policy.poll_s):
            try:
                # Without the lock: a push may hold it for a long time.
                for server in self._dead():
                    self._leave_rotation(server)
                with self._membership:
                    if not self.asleep:
                        self._probe_if_due()
                        for server in self._dead():
                            self._restart(server)
                        self._check_someone_is_left()
            except Exception as error:
                if not self._stopping.is_set():
                    self._give_up(error)
                return

    def _dead(self) -> list[FleetServer]:
        """Return the engines that died and are not being restarted yet."""
        watched = () if self._stopping.is_set() else self.servers
        return [server for server in watched if server not in self._out and not server.alive()]

    def _leave_rotation(self, server: FleetServer) -> None:
        if self._rotation is not None:
            self._rotation.remove(server.url)

    def _restart(self, server: FleetServer) -> None:
        """Restart an engine; a thread waits for it, so that the watch of the others continues."""
        self._leave_rotation(server)  # it may have died while the watch waited for a push
        now, end = time.monotonic(), server.describe_end()
        self._last_end = f"{server.plan.name} {end}"
        self._deaths.append(now)
        while now - self._deaths[0] > self._policy.restart_window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._policy.restart_limit:
            raise RunStopped(
                f"{self._what} died {len(self._deaths)} times within {self._policy.restart_window_s:.0f} s "
                f"(--limits engine-restarts={self._policy.restart_limit}){self._why_evicted}; "
                f"the last one, {server.plan.name}, {end}"
            ) from self._eviction
        logger.warning("%s\nThe engine is being restarted.", self._last_end)
        self._out.append(server)
        try:
            server.launch()
            follow = self._bring_back
        except MachineLost as error:
            logger.error(
                "%s cannot be restarted (%s); the run continues with the other engines until its machine is "
                "back.",
                *(server.plan.name, error),
            )
            follow = self._await_machine
            self._deaths.remove(now)  # only engines that die on machines that work end the run
        name = f"restart of {server.plan.name}"
        threading.Thread(target=follow, args=(server,), name=name, daemon=True).start()

    def _await_machine(self, server: FleetServer) -> None:
        """Restart an engine once its machine is back, under the address that clients know."""
        while not self._stopping.wait(_MACHINE_POLL_S):
            if self.asleep:
                continue
            with contextlib.suppress(MachineLost):
                server.launch()
                self._bring_back(server)
                return

    def _bring_back(self, server: FleetServer) -> None:
        try:
            server.wait_ready()
            while not self._join(server):
                if self._stopping.wait(self._policy.poll_s) or server not in self.servers:
                    return
                if not server.alive():
                    raise RuntimeError(f"it {server.describe_end()} while it waited for weights")
        except RunStopped as error:
            if server.alive():
                self._give_up(error)
            else:  # another death, counted at the next check
                self._out.remove(server)
            return
        except Exception as error:  # another death, counted at the next check
            if not self._stopping.is_set():
                self.evict(server.url, error)
            self._out.remove(server)
            return
        if self._rotation is not None:
            self._rotation.add(server)
        logger.warning("%s is ready again at %s", server.plan.name, server.url)

    def _join(self, server: FleetServer) -> bool:
        """Let a restarted engine load the current weights and serve; False: they are not written yet."""
        with self._membership:  # not held while an engine waits: a push may come first
            if server not in self.servers or not self._has_weights():  # the former: dismissed meanwhile
                return False
            self._bring_up_to_date(server.url)
            self._out.remove(server)
            self.num_restarts += 1
            return True

    @property
    def _why_evicted(self) -> str:
        """Return why the fleet killed the engine itself, which is not in the engine's log."""
        return f"; the last that was evicted: {self._eviction}" if self._eviction is not None else ""

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the first cause is kept
            self.failure.set_exception(error)

    def _check_someone_is_left(self) -> None:
        if any(map(self._serves, self.servers)) or not self.servers:
            self._alone_since = None
            return
        now, limit = time.monotonic(), self._policy.no_engine_timeout_s
        self._alone_since = self._alone_since or now
        if limit is not None and now - self._alone_since > limit:
            raise RunStopped(
                f"no engine was left for {limit:g} s (--timeouts no-engine){self._why_evicted}; "
                f"the last to go: {self._last_end}"
            ) from self._eviction

    def _probe_if_due(self) -> None:
        interval, timeout_s = self._policy.probe_interval_s, self._policy.probe_timeout_s
        if interval is None or time.monotonic() - self._last_probe < interval:
            return
        urls = [server.url for server in self.servers if self._serves(server)]
        answers = run(all_or_none([EngineControl(url).healthy(timeout_s) for url in urls]))
        for url, healthy in zip(urls, answers, strict=True):
            self._failed_probes[url] = 0 if healthy else self._failed_probes[url] + 1
            if self._failed_probes[url] >= self._policy.probe_failures:
                self._failed_probes[url] = 0
                self.evict(url, TimeoutError(f"no token within {timeout_s} s"))
        self._check_versions([url for url, healthy in zip(urls, answers, strict=True) if healthy])
        self._last_probe = time.monotonic()

    def _check_versions(self, urls: list[str]) -> None:
        """Evict an engine that lost its weights (another version, and no push is in progress)."""
        expected = self._expected_version()
        if expected is None:
            return
        held = run(
            all_or_none([EngineControl(url, self._policy.probe_timeout_s).loaded_version() for url in urls])
        )
        for url, version in zip(urls, held, strict=True):
            if version not in (None, expected):
                self.evict(url, RuntimeError(f"it has weights {version}, but the run is at {expected}"))
