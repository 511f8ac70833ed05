"""SGLang's own router before the engines: a supervised process that gets its workers back at a restart."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slime.engines.engine_process import Command, EngineServer, LaunchPlan
from slime.engines.sglang import supervisor
from slime.engines.sglang.router_registry import RouterGone, WorkerRegistry
from slime.engines.sglang.supervisor import NCCL_PORT, PORT
from slime.liveness import waits
from slime.liveness.heartbeat import HttpBeat, watch_servers
from slime.utils.machine import ports

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_RESTART_LIMIT = 5
_SILENCE_LIMIT_S = 10.0
_LIVENESS = "/liveness"


def router_command(python: str, policy: str, extra: Sequence[str] = ()) -> Command:
    """The router's command line under our supervisor; `extra`: more of its own flags, as words."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        words = [sys.executable, "-P", supervisor.__file__, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--probe", _LIVENESS, "--ready-file", str(ready_file), "--life-fd", str(life_fd), "--"]
        # The second port that the supervisor holds serves the metrics; left to itself
        # the router shows them to all machines.
        words += [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", PORT]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", NCCL_PORT, "--policy", policy]
        words += ["--health-check-interval-secs", "3", "--health-failure-threshold", "2"]
        return [*words, "--health-success-threshold", "1", *extra]

    return command


class SGLangRouter(WorkerRegistry):
    """Keeps its port over restarts, so that nobody learns a new address, and registers its workers again.

    `failure` gets the exception that ends the run. One that gives no sign of life for `silence_limit_s` is
    started again; 0: never.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        port: int = 0,
        silence_limit_s: float = _SILENCE_LIMIT_S,
    ):
        super().__init__("")  # the address is known when it serves
        self._server = EngineServer(plan, port)
        self._stopping, self._watches_silence = threading.Event(), silence_limit_s > 0
        self._serves = False
        self._heartbeats = watch_servers(silence_limit_s or math.inf, self._end_silent)
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def start(self) -> int:
        """Serves with all workers known; returns the port."""
        port, host = self._server.port, self._server.plan.host
        if port and not ports.is_port_available(port, host):
            raise ValueError(
                f"--sglang-router-port is {port}: another program has it; choose another, or leave it out."
            )
        self._bring_up()
        threading.Thread(target=self._watch, name="router-watch", daemon=True).start()
        if self._watches_silence:
            # The router answers this path itself; other paths it hands on to engines.
            watched = HttpBeat(self._server, lambda: self._serves and self._server.alive(), _LIVENESS)
            self._heartbeats.add(watched)
        return self._server.port

    # ---- its life ------------------------------------------------------------------------------------------

    def _bring_up(self) -> None:
        self._serves = False
        self._server.launch()
        self.url = self._server.wait_ready()
        waits.know_as(self.url, "router")
        self._register_all()
        self._serves = True

    def _end_silent(self, beat: HttpBeat, cause: str) -> None:
        """The watch starts it again."""
        logger.error("The router gave no sign of life for %s; it is restarted.", cause)
        self._server.kill()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            if self._server.alive():
                continue
            if self.num_restarts >= _RESTART_LIMIT:
                times, end = self.num_restarts + 1, self._server.describe_end()
                self.failure.set_exception(RouterGone(f"the router died {times} times; it {end}"))
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
        self._heartbeats.close()
        self._server.stop()
