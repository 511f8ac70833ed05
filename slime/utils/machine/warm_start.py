"""Starts the children of the quick start with their imports done, by the standard library's fork server.

Imports are half of a small run's start, and each of its processes pays for them. Within `warm_starts` a fork
server (`multiprocessing.forkserver`) that has imported the modules forks each child, which gets the files,
environment, folder and session that `exec` would give it. Its exit code comes through the fork server. A
command that the fork server cannot run is started by `exec`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil

from slime.utils.machine.children import Child, import_environment, thread_environment
from slime.utils.misc import is_installed

_MAIN = re.compile(r"from ([\w.]+) import main; main\(\)")
_is_running = False


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Any,
    pass_fds: Sequence[int],
    start_new_session: bool = False,
) -> Child:
    """Start a Python program without standard input that writes into `log`; fork it where possible."""
    module = module_of(list(command)) if _is_running and _server_lives() else None
    if module is not None:
        job = _Job(module, tuple(command[4:]), dict(env), os.getcwd(), start_new_session, (1, 2, *pass_fds))
        with contextlib.suppress(OSError, EOFError):  # the fork server is gone
            return WarmChild(job, [log.fileno(), log.fileno(), *pass_fds], list(command))
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=pass_fds,
        start_new_session=start_new_session,
    )


def _server_lives() -> bool:
    """Return whether the fork server runs: the library would restart a dead one, without its environment."""
    try:
        server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
        return bool(server.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def warm_starts(modules: Sequence[str]) -> Iterator[None]:
    """Within this block children are forked from a process that has imported `modules`."""
    global _is_running
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():  # CUDA does not survive a fork
        yield
        return
    forkserver.set_forkserver_preload(list(modules))
    before = dict(os.environ)
    # A process that forks must have one thread; libraries read these variables when they are loaded.
    os.environ.update(thread_environment(1) | import_environment())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    _is_running = True
    try:
        yield
    finally:
        _is_running = False
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def module_of(words: list[str]) -> str | None:
    """Return the module whose `main` the program runs; None: the program has another form."""
    match words:
        case [sys.executable, "-P", "-m", package, *_] if package.startswith("slime."):
            return f"{package}.__main__" if is_installed(f"{package}.__main__") else None
        case [sys.executable, "-P", "-c", code, *_] if found := _MAIN.fullmatch(code):
            return found[1]
    return None


class WarmChild:
    """A child of the fork server, with `poll`, `wait` and signals like `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, job: _Job, fds: list[int], words: list[str]):
        self.args = words
        self._lock = threading.Lock()
        self._status, pipe = forkserver.connect_to_new_process(fds)
        with open(pipe, "wb") as out:
            out.write(pickle.dumps({}) + pickle.dumps(job))
        self.pid: int = forkserver.read_signed(self._status)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and connection.wait([self._status], 0):
                try:
                    self.returncode = forkserver.read_signed(self._status)
                except EOFError:  # the fork server was killed, so the exit code is unknown
                    self.returncode = 255
                os.close(self._status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            with contextlib.suppress(OSError):  # closed by another thread: it has ended
                connection.wait([self._status], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Job:
    """The work of a forked process. The fork server unpickles it there and calls `_bootstrap`."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    new_session: bool
    numbers: tuple[int, ...]  # of the files that come with it

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the program and return its exit code, as the interpreter would."""
        try:
            self._become()
            importlib.import_module(self.module).main()
            return 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

    def _become(self) -> None:
        inherited = forkserver.get_inherited_fds() or []
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # it is closed next
        nothing = os.open(os.devnull, os.O_RDONLY)
        _take_files({0: nothing, **dict(zip(self.numbers, inherited, strict=True))})
        if self.new_session:
            os.setsid()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = [self.module, *self.arguments]
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        if (torch := sys.modules.get("torch")) and (threads := os.environ.get("OMP_NUM_THREADS")):
            torch.set_num_threads(int(threads))


def _take_files(wanted: dict[int, int]) -> None:
    """Move each file to its descriptor number and close all others."""
    high = max(64, *wanted, *wanted.values()) + 1
    parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for number, fd in wanted.items()}
    os.closerange(0, high)
    for number, fd in parked.items():
        os.dup2(fd, number)
        os.close(fd)
