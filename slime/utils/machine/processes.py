"""Children that die with their parent, and thread counts per role.

A child inherits the read end of a pipe whose write end only the parent holds. When the parent ends, by any
signal, the kernel closes the write end and the child reads end-of-file. PDEATHSIG would fire when the
*thread* that spawned the child ends, which is wrong for children started from a worker thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from slime.utils.files.restricted import restricted


class Child(Protocol):
    """What is asked of a child process, as of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | Any: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class LifePipe:
    """Held by the parent for as long as its children may live."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close on exec; the read end is passed on explicitly

    def close(self) -> None:
        for fd in (self.read_fd, self._write_fd):
            try:
                os.close(fd)
            except OSError:
                continue  # already closed
        self.read_fd = self._write_fd = -1


def watch_parent(fd: int, on_death: Callable[[], None] | None = None) -> None:
    """In a child: end this process at once when the parent
    is gone. `on_death` cleans up what the parent owned.
    """

    def wait_for_eof() -> None:
        try:
            while os.read(fd, 1):
                pass
        except OSError:
            pass  # a closed pipe means the same
        try:
            if on_death is not None:
                on_death()
        finally:
            os._exit(1)

    threading.Thread(target=wait_for_eof, name="parent-watch", daemon=True).start()


def import_environment() -> dict[str, str]:
    """Environment of a Python child that finds modules where this process does; start it with `-P`.

    Without `-P`, `python -m` looks into the working folder
    first, where a user's `queue.py` would shadow Python's own.
    """
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment of a child that computes with `num_threads`, waits without spinning, and keeps memory that
    it will soon need again (glibc would give it back between two operations, and clear it anew).
    """
    n = str(num_threads)
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes: larger tensors come and go
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),  # what a step of a model of this size needs, as in the next
        "MALLOC_TOP_PAD_": str(16 << 20),
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def open_log(path: Path, name: str) -> Iterator[BinaryIO]:
    """The log of a process that is about to start; never empty, and each start can be told from the next."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=restricted) as log:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"[{now}] {name} is started; what it writes follows\n".encode())
        log.flush()
        yield log


def last_lines(path: Path, lines: int = 20) -> str:
    """The last lines of a log file."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def stop_process(process: Child, grace_s: float = 5.0) -> None:
    """Ask, wait, then kill; returns when the process is gone."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
