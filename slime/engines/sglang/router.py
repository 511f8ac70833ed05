"""Manages SGLang's router in front of the engines: slime's own process, or an external one."""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from slime.engines.engine_process import Command, EngineServer, LaunchPlan
from slime.engines.fleet import EngineFleet, FleetServer, WatchPolicy
from slime.engines.sglang import supervisor
from slime.engines.sglang.supervisor import NCCL_PORT, PORT
from slime.liveness import waits
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.machine import ports

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_REGISTER_DEADLINE_S = 120.0
_LOOK_S = 3.0  # seconds between two checks of an external router
_UNREACHED = (http_utils.HttpError, OSError, aiohttp.ClientError, TimeoutError)
_LIVENESS = "/liveness"  # the router serves this path itself; it forwards other paths to engines


def router_command(python: str, policy: str, extra: Sequence[str] = ()) -> Command:
    """Return the router's command under our supervisor; `extra`: more of its own flags, as arguments."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        words = [sys.executable, "-P", supervisor.__file__, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--probe", _LIVENESS, "--ready-file", str(ready_file), "--life-fd", str(life_fd), "--"]
        # The supervisor's second port serves the metrics; by default the router serves them to all machines.
        words += [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", PORT]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", NCCL_PORT, "--policy", policy]
        words += ["--health-check-interval-secs", "3", "--health-failure-threshold", "2"]
        return [*words, "--health-success-threshold", "1", *extra]

    return command


class WorkerRegistry:
    """Registers engines at the router of `url`; if the router is down, it is updated when it is back."""

    def __init__(self, url: str):
        self.url = url
        self._workers: dict[str, dict[str, Any]] = {}  # address -> registration
        self._changing = threading.Lock()

    def enroll(self, server: FleetServer) -> None:
        """Adds a worker to register; called before the start."""
        self._workers[server.url] = registration(server)

    def add(self, server: FleetServer) -> None:
        """Register an engine that is back; if the router is down, as soon as the router is back."""
        with self._changing:
            self.enroll(server)
            self._quietly(self._register, server.url)

    def remove(self, url: str) -> None:
        with self._changing:
            if self._workers.pop(url, None) is not None:
                self._quietly(self._unregister, url)

    def _register_all(self) -> None:
        """Register all workers and wait until each receives requests: the router registers asynchronously."""
        with self._changing:
            for url in self._workers:
                self._register(url)
        waits.until(
            lambda: known_workers(self.url, healthy=True) >= self._workers.keys(),
            "registration of engines at the router",
            _REGISTER_DEADLINE_S,
            interval_s=_POLL_S,
        )

    def _register(self, url: str) -> None:
        run(http_utils.post(f"{self.url}/workers", self._workers[url], max_retries=3))

    def _unregister(self, url: str) -> None:
        for worker in _workers_at(self.url):
            if worker["url"] == url:
                run(_delete(f"{self.url}/workers/{worker['id']}"))

    def _quietly(self, change: Callable[[str], None], url: str) -> None:
        try:
            change(url)
        except _UNREACHED as error:
            logger.warning("The router at %s did not accept a change of its workers: %s", self.url, error)


class SGLangRouter(WorkerRegistry):
    """SGLang's router as slime's own process; after a restart it keeps its port and its workers.

    `failure` gets the exception that ends the run.
    """

    def __init__(self, plan: LaunchPlan, policy: WatchPolicy, *, port: int = 0):
        super().__init__("")  # the address is known when it serves
        self._server = EngineServer(plan, port)
        self._watched = EngineFleet([self._server], policy, what="the router", heartbeat_path=_LIVENESS)
        self._watched.keep_current(lambda: None, lambda url: self._register_all())
        self.failure = self._watched.failure

    def start(self) -> int:
        """Serve with all workers known; return the port."""
        port, host = self._server.port, self._server.plan.host
        if port and not ports.is_port_available(port, host):
            raise ValueError(
                f"--sglang-router-port is {port}: another program uses it; choose another, or leave it out."
            )
        self._watched.launch()
        [self.url] = self._watched.wait_ready()
        self._register_all()
        return self._server.port

    def stop(self) -> None:
        self._watched.stop()


class ExternalRouter(WorkerRegistry):
    """A router that somebody else runs (--sglang-router-ip): slime never starts or stops it.

    Workers that it has lost in a restart are registered again. `failure` gets the exception that ends the
    run: the router did not respond for `patience_s`.
    """

    def __init__(self, host: str, port: int, *, patience_s: float):
        super().__init__(f"http://{host}:{port}")
        self._patience_s = patience_s
        self._stopping = threading.Event()
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> None:
        """Return when the router has registered all engines."""
        self._register_all()
        threading.Thread(target=self._watch, name="external-router-watch", daemon=True).start()

    def _watch(self) -> None:
        silent_s = 0.0
        while not self._stopping.wait(_LOOK_S):
            try:
                missing = self._workers.keys() - known_workers(self.url)
                silent_s = 0.0
            except _UNREACHED as error:
                silent_s += _LOOK_S
                if silent_s >= self._patience_s:
                    who = f"the router at {self.url} (--sglang-router-ip)"
                    why = f"{who} has not responded for {silent_s:.0f} s: {error}"
                    self.failure.set_exception(RunStopped(why))
                    return
                continue
            with self._changing:
                for url in missing & self._workers.keys():
                    logger.warning("The router at %s lost engine %s; it is registered again.", self.url, url)
                    self._quietly(self._register, url)

    def stop(self) -> None:
        """Remove our engines, which end now."""
        self._stopping.set()
        for url in list(self._workers):
            self.remove(url)


def _workers_at(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(http_utils.get(f"{router}/workers", max_retries=3, timeout_s=5.0))[
        "workers"
    ]
    return found


def known_workers(router: str, *, healthy: bool = False) -> set[str]:
    """Return the addresses of a router's workers; with `healthy`, only of workers that receive requests."""
    return {one["url"] for one in _workers_at(router) if not healthy or one.get("is_healthy", True)}


async def _delete(url: str) -> None:
    async with http_utils.get_session().delete(url, timeout=aiohttp.ClientTimeout(total=5.0)):
        pass


def registration(server: FleetServer) -> dict[str, Any]:
    """Return what a router needs to know of a worker: its address and token, and its kind."""
    kind, token = server.plan.worker_type, http_utils.token_of(server.url)
    made: dict[str, Any] = {"url": server.url}
    if token is not None:
        made["api_key"] = token
    if kind != "regular":
        made["worker_type"] = kind
    if kind == "prefill":
        made["bootstrap_port"] = server.bootstrap_port
    return made
