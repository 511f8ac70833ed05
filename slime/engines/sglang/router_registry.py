"""Registers engines at a router, and watches a router that somebody else runs."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from slime.engines.fleet import FleetServer
from slime.liveness import waits
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_REGISTER_DEADLINE_S = 120.0
_LOOK_S = 3.0  # between two looks at a router of others
_UNREACHED = (http_utils.HttpError, OSError, aiohttp.ClientError, TimeoutError)


class RouterGone(RunStopped):
    """Without a router no request finds an engine."""


class WorkerRegistry:
    """Engines at the router of `url`, which may be down for a while: it learns the rest when it is back."""

    def __init__(self, worker_urls: Sequence[str] = ()):
        self._workers = {url: address(url) for url in worker_urls}  # what each is registered with
        self._changing = threading.Lock()

    @property
    def url(self) -> str:
        raise NotImplementedError

    def enroll(self, server: FleetServer) -> None:
        """Adds a worker to register; called before the start."""
        self._workers[server.url] = registration(server)

    def add(self, server: FleetServer) -> None:
        """An engine is back; a router that is down itself learns it when it comes up."""
        with self._changing:
            self.enroll(server)
            self._quietly(lambda: _register(self.url, registration(server)))

    def remove(self, url: str) -> None:
        with self._changing:
            if self._workers.pop(url, None) is not None:
                self._quietly(lambda: run(unregister(self.url, url)))

    def _register_all(self) -> None:
        """Register all workers and wait until each receives requests: the router registers asynchronously."""
        with self._changing:
            for worker in self._workers.values():
                _register(self.url, worker)
        waits.until(
            self._knows_all, "registration of engines at the router", _REGISTER_DEADLINE_S, interval_s=_POLL_S
        )

    def _knows_all(self) -> bool:
        return healthy_workers(self.url) >= set(self._workers)

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except _UNREACHED as error:
            logger.warning("The router at %s did not accept a change of its workers: %s", self.url, error)


class ExternalRouter(WorkerRegistry):
    """A router that others run (--sglang-router-ip): it is never started and never stopped.

    Workers that it has lost in a restart are registered again. `failure` gets the exception that ends the
    run: the router did not respond for `patience_s`.
    """

    def __init__(self, host: str, port: int, *, patience_s: float):
        super().__init__()
        self.host, self.port = host, port
        self._patience_s = patience_s
        self._stopping = threading.Event()
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Returns when it knows all engines."""
        self._register_all()
        threading.Thread(target=self._watch, name="external-router-watch", daemon=True).start()

    def _watch(self) -> None:
        silent_s = 0.0
        while not self._stopping.wait(_LOOK_S):
            try:
                missing = set(self._workers) - known_workers(self.url)
                silent_s = 0.0
            except _UNREACHED as error:
                silent_s += _LOOK_S
                if silent_s >= self._patience_s:
                    text = (
                        f"the router at {self.url} (--sglang-router-ip) has not answered for {silent_s:.0f} s"
                    )
                    self.failure.set_exception(RouterGone(f"{text}: {error}"))
                    return
                continue
            with self._changing:
                for url in missing & set(self._workers):
                    logger.warning(
                        "The router at %s no longer knows engine %s; it is registered again.",
                        self.url,
                        url,
                    )
                    worker = self._workers[url]
                    self._quietly(lambda worker=worker: _register(self.url, worker))  # type: ignore[misc]

    def stop(self) -> None:
        """Takes our engines out, which end now."""
        self._stopping.set()
        for url in list(self._workers):
            self.remove(url)


def _register(router: str, worker: dict[str, Any]) -> None:
    run(http_utils.post(f"{router}/workers", worker, max_retries=3))


def _workers_of(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(http_utils.get(f"{router}/workers", max_retries=3))["workers"]
    return found


def known_workers(router: str) -> set[str]:
    return {worker["url"] for worker in _workers_of(router)}


def healthy_workers(router: str) -> set[str]:
    """Return the addresses of workers that receive requests."""
    return {worker["url"] for worker in _workers_of(router) if worker.get("is_healthy", True)}


def registration(server: FleetServer) -> dict[str, Any]:
    kind, where = server.plan.worker_type, address(server.url)
    if kind == "regular":
        return where
    bootstrap = {"bootstrap_port": server.bootstrap_port} if kind == "prefill" else {}
    return {**where, "worker_type": kind, **bootstrap}


def address(url: str) -> dict[str, Any]:
    """The address of a worker, and the token that it asks for."""
    token = http_utils.token_of(url)
    return {"url": url, **({"api_key": token} if token is not None else {})}


async def unregister(router: str, url: str) -> None:
    for worker in (await http_utils.get(f"{router}/workers", timeout_s=5.0))["workers"]:
        if worker["url"] == url:
            timeout = aiohttp.ClientTimeout(total=5.0)
            async with http_utils.get_session().delete(f"{router}/workers/{worker['id']}", timeout=timeout):
                pass
