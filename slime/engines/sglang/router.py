"""SGLang's own router before the engines: a supervised process that knows its workers again after a restart."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slime.engines.server import Command, EngineServer, LaunchPlan
from slime.engines.sglang import supervisor
from slime.engines.sglang.supervisor import NCCL_PORT, PORT
from slime.utils import http_utils, waits
from slime.utils.async_utils import run

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_REGISTER_DEADLINE_S = 120.0
_RESTART_LIMIT = 5


def router_command(python: str, policy: str, extra: Sequence[str] = ()) -> Command:
    """The router's command line under our supervisor; `extra`: more of its own flags, as words."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        words = [sys.executable, "-P", supervisor.__file__, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--probe", "/liveness", "--ready-file", str(ready_file), "--life-fd", str(life_fd), "--"]
        # The second port that the supervisor holds serves the metrics.
        words += [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", PORT]
        words += ["--prometheus-port", NCCL_PORT, "--policy", policy]
        words += ["--health-check-interval-secs", "3", "--health-failure-threshold", "2"]
        return [*words, "--health-success-threshold", "1", *extra]

    return command


class SGLangRouter:
    """Keeps its port over restarts, so that nobody learns a new address."""

    def __init__(self, plan: LaunchPlan, worker_urls: Sequence[str]):
        self._server, self._worker_urls = EngineServer(plan), tuple(worker_urls)
        self._stopping = threading.Event()
        self.num_restarts = 0

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def start(self) -> int:
        """Serves with all workers known; returns the port."""
        self._bring_up()
        threading.Thread(target=self._watch, name="router-watch", daemon=True).start()
        return self._server.port

    def _bring_up(self) -> None:
        self._server.launch()
        self._server.wait_ready()
        for url in self._worker_urls:
            run(http_utils.post(f"{self.url}/workers", {"url": url}, max_retries=3))
        # Registration goes on after the answer: only now would requests find a worker.
        waits.until(self._knows_all, "registration of engines at the router", _REGISTER_DEADLINE_S, interval_s=_POLL_S)

    def _knows_all(self) -> bool:
        known = run(http_utils.get(f"{self.url}/workers", max_retries=3))["workers"]
        return {w["url"] for w in known if w.get("is_healthy", True)} >= set(self._worker_urls)

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            if self._server.alive():
                continue
            if self.num_restarts >= _RESTART_LIMIT:
                logger.error("the router keeps dying and is given up; it %s", self._server.describe_end())
                return
            logger.warning("the router %s\nrestarting it", self._server.describe_end())
            try:
                self._bring_up()
            except Exception as error:  # one more death, looked at in the next round
                logger.error("the router did not come back: %s", error)
                self._server.kill()
            self.num_restarts += 1

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop()
