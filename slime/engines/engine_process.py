"""One engine process: starts it with a log file, waits for it with a timeout, stops and restarts it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slime.liveness import usage, waits
from slime.liveness.heartbeat import ENGINE_PATH
from slime.liveness.vital_signs import Signs, signs_of_group
from slime.utils import http_utils
from slime.utils.errors import RunStopped
from slime.utils.machine import ports, warm_start
from slime.utils.machine.children import Child, LifePipe, describe_exit, kill_group, open_log, stop_process
from slime.wire.protocol import EngineInfo

_LOG_TAIL_LINES, _LOG_LINE_CHARACTERS = 20, 600
# An argument that is replaced by the address at which the processes of an engine meet.
MEETING_POINT = "{meeting_point}"
# Ports that are kept from the meeting point on: SGLang derives some of its own from it, up to the point + 13.
_MEETING_PORTS = 14
_LOWEST_MEETING_PORT = 20_000  # below are the ports of many services, and of Ray's workers
_MEETING_TRIES = 200
# After a kill, children of the process may hold its port for a while, longer on a slow machine.
_PORT_PATIENCE_S = 30.0

Command = Callable[[int, Path, int], list[str]]


class MachineLost(RunStopped):
    """The machine with the engine's devices is gone."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Instructions to start an engine. `command` gets the port (0: any), ready file and life pipe's fd."""

    name: str
    command: Command
    env: dict[str, str]
    log_path: Path
    start_timeout_s: float
    worker_type: str = "regular"  # or prefill, decode: its role in disaggregation
    host: str = "127.0.0.1"  # the address that it binds and clients use
    beside_trainer: bool = True  # on the machine of the trainer's first rank
    token: str | None = field(default=None, repr=False)  # the token that clients need; None: none


@dataclass(frozen=True, slots=True)
class Serving:
    """Address and process of a ready engine. `bootstrap_port`: port of a prefill engine in disaggregation."""

    host: str
    port: int
    pid: int | None = None
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        return f"http://{ports.with_port(self.host, self.port)}"


class EngineServer:
    """An engine process and its address. The port stays the same over restarts, so that clients can keep the
    address.

    `port`: the port of an earlier process of this engine; 0: any. The object lives on the engine's machine.
    """

    def __init__(self, plan: LaunchPlan, port: int = 0):
        self.plan = plan
        self.port = port
        self.bootstrap_port: int | None = None  # bootstrap port of a prefill engine
        self._held_port: socket.socket | None = None
        self._meeting_ports: list[socket.socket] = []
        self._process: Child | None = None
        self._life = LifePipe()
        self._ready_file = plan.log_path.with_suffix(".ready")  # exists from readiness until it is read

    @property
    def url(self) -> str:
        return f"http://{ports.with_port(self.plan.host, self.port)}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def transports(self, info: EngineInfo) -> tuple[str, ...]:
        """Return the transports into the engine; our engines run on this machine, where all of them work."""
        return info.transports

    def launch(self, meeting_point: str = "") -> str:
        """Start the process without waiting for it. A restart gets the same port, which clients know.

        The processes of an engine over several machines meet at the address that the first one returns.
        """
        if self._process is not None:
            kill_group(self._process)  # files of an earlier process
        self._take_port()
        self._ready_file.unlink(missing_ok=True)  # of a start that failed
        words = self.plan.command(self.port, self._ready_file, self._life.read_fd)
        if MEETING_POINT in words and not meeting_point:
            meeting_point = ports.with_port(self.plan.host, self._take_meeting_ports())
        network = ports.interface_environment(self.plan.host)
        command = [meeting_point if word == MEETING_POINT else word for word in words]
        # In its environment, where other users of the machine cannot read it.
        token = {http_utils.TOKEN_VARIABLE: self.plan.token} if self.plan.token is not None else {}
        inherited = {name: value for name, value in os.environ.items() if name != http_utils.TOKEN_VARIABLE}
        with open_log(self.plan.log_path, self.plan.name) as log:
            self._process = warm_start.start(
                command,
                env={**network, **inherited, **self.plan.env, **token},
                log=log,
                pass_fds=[self._life.read_fd],
                start_new_session=True,  # only the driver gets Ctrl-C, and stops the engine in order
            )
        usage.follow(self.plan.name, self._process.pid, {**os.environ, **self.plan.env}, whole=True)
        return meeting_point

    def _take_meeting_ports(self) -> int:
        """Reserve other ports than last time, which an earlier process may still hold; return the first."""
        self._free_meeting_ports()
        try:
            self._meeting_ports = hold_ports_in_a_row(self.plan.host, _MEETING_PORTS)
        except OSError as error:
            raise RunStopped(f"{self.plan.name} cannot start: {error}; end programs that use them") from error
        return int(self._meeting_ports[0].getsockname()[1])

    def _free_meeting_ports(self) -> None:
        for held in self._meeting_ports:
            held.close()
        self._meeting_ports = []

    def _take_port(self) -> None:
        """Reserve the port from the first start on, also between two processes of the engine."""
        if self.port:
            try:
                waits.until(
                    lambda: ports.is_port_available(self.port, self.plan.host),
                    f"port {self.port}",
                    _PORT_PATIENCE_S,
                )
            except waits.WaitTimeout as error:
                raise RunStopped(
                    f"port {self.port} of {self.plan.name} was taken by another program while the engine was "
                    "down, and clients know no other: end that program, or start the run again with --load"
                ) from error
        if self._held_port is None:
            self._held_port = ports.hold_port(self.plan.host, self.port)
        if self._held_port is not None:
            self.port = self._held_port.getsockname()[1]

    def wait_ready(self) -> str:
        """Wait until it serves; return its address."""
        try:
            waits.until(
                self._is_ready,
                f"start of {self.plan.name} on {self.plan.host}",
                self.plan.start_timeout_s,
                owner="engine fleet",
                interval_s=0.02,
            )
        except waits.WaitTimeout as error:
            raise RunStopped(f"{error} (--timeouts engine-start); {self._last_words()}") from None
        facts = json.loads(self._ready_file.read_text())
        self.port, self.bootstrap_port = facts["port"], facts.get("bootstrap_port")
        self._ready_file.unlink()
        http_utils.authorize(self.url, self.plan.token)
        return self.url

    def wait_serving(self) -> Serving:
        """Wait until it serves; return all that clients need to know."""
        self.wait_ready()
        return Serving(self.plan.host, self.port, self.pid, self.bootstrap_port)

    def wait_end(self) -> str:
        """Wait until the process is gone; return how it ended, also if it was never started."""
        if self._process is not None:
            self._process.wait()
        return self.describe_end()

    def _is_ready(self) -> bool:
        if not self.alive():
            raise RunStopped(f"{self.plan.name} {self.describe_end()}")
        return self._ready_file.exists()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signs(self) -> Signs | None:
        """Return signs of life of the process and its workers, which have their own process group."""
        return signs_of_group(self._process.pid) if self._process is not None else None

    def describe_end(self) -> str:
        """Describe how the process ended, with the last lines of its log."""
        code = self._process.returncode if self._process else None
        return f"{describe_exit(code)}; {self._last_words()}"

    def _last_words(self) -> str:
        lines = self.plan.log_path.read_text(errors="replace").splitlines()
        # Some servers log every request.
        shown = [line[:_LOG_LINE_CHARACTERS] for line in lines if f"GET {ENGINE_PATH} " not in line]
        return "\n".join([f"last lines of {self.plan.log_path}:", *shown[-_LOG_TAIL_LINES:]])

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            stop_process(self._process)
            kill_group(self._process)
        self._ready_file.unlink(missing_ok=True)
        self._life.close()
        self._free_meeting_ports()
        if self._held_port is not None:
            self._held_port.close()


def hold_ports_in_a_row(host: str, count: int) -> list[socket.socket]:
    """Keep `count` ports that follow each other, each as `ports.hold_port` does; OSError: there are none.

    They lie below the ports that systems give to connections, so that they are probably free on other hosts,
    too.
    """
    end = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = end if end > _LOWEST_MEETING_PORT + count else 65_536
    for _ in range(_MEETING_TRIES):
        first, held = random.randrange(_LOWEST_MEETING_PORT, end - count), list[socket.socket]()
        for port in range(first, first + count):
            if (one := ports.hold_port(host, port)) is None:
                break
            held.append(one)
        else:
            return held
        for one in held:
            one.close()
    raise OSError(f"{host} has no {count} free ports in a row between {_LOWEST_MEETING_PORT} and {end}")
