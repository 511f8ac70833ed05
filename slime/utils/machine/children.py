"""Starts, holds and ends child processes.

Every child ends with its parent: it inherits the read end of a pipe (or a socket) whose other end only the
parent holds, and reads end-of-file when the parent ends, by whatever signal. PDEATHSIG would fire when the
*thread* that started the child ends, which is wrong for children started from a worker thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from slime.utils.files.restricted import restricted

PIPE = subprocess.PIPE


class Child(Protocol):
    """A child process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | Any: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


# ---- start -------------------------------------------------------------------------------------------------


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    output: IO[Any] | int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own: Ctrl-C reaches the driver alone, which ends it in order.

    `output` takes stdout and stderr; None: those of this process. All descriptors but `pass_fds` are closed.
    """
    return subprocess.Popen(
        command,
        env=env,
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def import_environment() -> dict[str, str]:
    """Return the environment of a Python child that finds modules where this process does.

    Start the child with `-P`: `python -m` would search the working folder first, where a user's `queue.py`
    would shadow Python's module.
    """
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the environment of a child that computes with `num_threads` and waits without spinning.

    The malloc settings keep freed memory: otherwise glibc returns and clears it in every step.
    """
    n = str(num_threads)
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "MALLOC_TOP_PAD_": str(16 << 20),
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def open_log(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open the log of a process that is about to start, with a line that separates it from earlier starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=restricted) as log:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"[{now}] {name} starts; its output follows\n".encode())
        log.flush()
        yield log


def last_lines(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log file."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


# ---- end ---------------------------------------------------------------------------------------------------


class LifePipe:
    """A pipe that the parent keeps open while its children may live; pass `read_fd` to them."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        for fd in (self.read_fd, self._write_fd):
            with contextlib.suppress(OSError):  # already closed
                os.close(fd)
        self.read_fd = self._write_fd = -1


def watch_parent(fd: int, on_death: Callable[[], None] | None = None) -> None:
    """In a child, end this process when the parent is gone; `on_death` cleans up what the parent owned."""

    def wait_for_eof() -> None:
        with contextlib.suppress(OSError):  # a closed pipe means the same
            while os.read(fd, 1):
                pass
        try:
            if on_death is not None:
                on_death()
        finally:
            os._exit(1)

    threading.Thread(target=wait_for_eof, name="parent-watch", daemon=True).start()


def stop_process(process: Child, grace_s: float = 5.0) -> None:
    """Send SIGTERM, wait, then kill; return when the process is gone."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        wait_or_kill(process, grace_s)


def wait_or_kill(process: Child, grace_s: float) -> int:
    """Wait for a process that was asked to end, and kill it after `grace_s`; return its exit code."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def kill_group(leader: Child) -> None:
    """Kill a process that leads a group, with all processes of that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, to follow its name."""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
