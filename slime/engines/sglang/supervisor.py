"""Supervises one SGLang server: finds ports, reports when it serves, and ends it with the run.

SGLang does not know the life pipe, so this process holds it. It leads the process group of the server and its
workers. When the pipe ends, on SIGTERM, or when one of the processes dies, it kills the whole group. It
imports nothing of slime, so that a supervisor costs next to nothing.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil

# Placeholders in the server's command that this process fills in.
PORT, NCCL_PORT, BOOTSTRAP_PORT = "{port}", "{nccl_port}", "{bootstrap_port}"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.25
_STOP_GRACE_S = 3.0


class PortHold:
    """Reserves a port until the server binds it.

    The socket is bound and never listens: with SO_REUSEADDR on both sides the server can bind the same port,
    while the system assigns it to no other program.
    """

    def __init__(self, host: str, port: int):
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self.port = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()


class Supervisor:
    """Runs one server, from the choice of its ports to its end."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._server: subprocess.Popen[bytes] | None = None
        self._workers: set[int] = set()

    def run(self) -> int:
        """Run until the server ends; return its exit code."""
        threading.Thread(target=self._watch_parent, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        named = [word for word in (NCCL_PORT, BOOTSTRAP_PORT) if word in self._options.command]
        held = {PORT: PortHold(self._options.host, self._options.port)}
        held |= {word: PortHold(self._options.host, 0) for word in named}
        port, words = held[PORT].port, {word: str(hold.port) for word, hold in held.items()}
        command = [words.get(word, word) for word in self._options.command]
        self._server = _spawn(command)
        if self._options.beside:  # not below the server, whose workers may survive it
            _spawn([command[0], "-P", self._options.beside, *command[1:]])
        while (code := self._server.poll()) is None and not self._serves(port):
            time.sleep(_POLL_S)
        for hold in held.values():
            hold.release()
        if code is None:
            self._workers = _workers_of(self._server.pid)
            bootstrap_port = held[BOOTSTRAP_PORT].port if BOOTSTRAP_PORT in held else None
            _write_ready(Path(self._options.ready_file), port, bootstrap_port)
            code = self._wait_for_end()
        _kill_rest_of_group()
        return code

    def _serves(self, port: int) -> bool:
        """Return True once the server generates a token (or its probe succeeds)."""
        try:
            host = self._options.host
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}{self._options.probe}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _wait_for_end(self) -> int:
        server, stopped_polls = self._server, 0
        assert server is not None, "called for a server that was started"
        while (code := server.poll()) is None:
            states = [_state(pid) for pid in self._workers]
            if not all(states):
                self._end_group("a worker of the server died")
            # Polls are counted, not seconds: if this process was stopped
            # together with the server, both resume together.
            stopped_polls = stopped_polls + 1 if psutil.STATUS_STOPPED in (*states, _state(server.pid)) else 0
            if stopped_polls > self._options.stopped_limit_s / _POLL_S:
                self._end_group("the server or a worker of it is stopped (SIGSTOP)")
            time.sleep(_POLL_S)
        return code

    def _watch_parent(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._options.life_fd, 1):
                pass
        self._end_group()

    def _stop(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_STOP_GRACE_S)
        self._end_group()

    def _end_group(self, why: str = "") -> None:
        """Kill the whole group, including this process, which has nothing left to do."""
        if why:
            print(f"supervisor: {why}; the server is killed", flush=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    """Run in the child before exec: the kernel ends it with the supervisor's main thread."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _workers_of(server: int) -> set[int]:
    """Return all descendants of the server."""
    found, children = set[int](), list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        children = psutil.Process(server).children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.add(process.pid)
    return found


def _kill_rest_of_group() -> None:
    """Kill workers that a dead server left."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if pid != os.getpid() and os.getpgid(pid) == os.getpgid(0):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str | None:
    """Return the system's state of a process; None: it has ended."""
    with contextlib.suppress(psutil.Error):
        state = psutil.Process(pid).status()
        return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(state)
    return None


def _write_ready(path: Path, port: int, bootstrap_port: int | None) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"port": port, "pid": os.getpid(), "bootstrap_port": bootstrap_port}))
    part.rename(path)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True, help="0: any free one")
    parser.add_argument("--probe", default="/health_generate", help="returns 200 when ready")
    parser.add_argument("--ready-file", required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    parser.add_argument(
        "--stopped-limit-s", type=float, default=10.0, help="seconds after which a stopped server is killed"
    )
    parser.add_argument("--beside", help="a script that prepares the start, for the same interpreter")
    parser.add_argument("command", nargs="+", help="the server's command line, after --")
    return Supervisor(parser.parse_args(argv)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
