"""Writes the stacks of all threads and asyncio tasks of a process to its log when it gets SIGUSR2.

The interpreter itself writes those of the threads, so that a process that hangs inside a C call or holds
Python's lock writes them too; the asyncio tasks follow when the main thread runs Python code again.
"""

import asyncio
import contextlib
import faulthandler
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from slime.utils import async_utils
from slime.utils.files.restricted import restricted

SIGNAL = signal.SIGUSR2
_STDERR = 2  # the descriptor: the file object may be closed when the interpreter exits
_TASK_FRAMES, _MAX_TASKS = 8, 200


def answer_signal() -> None:
    """Make this process write its stacks to stderr, its log, when it is asked."""
    if sys.__stderr__ is not None and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(ValueError, OSError):  # a stderr that is no file
            _install(sys.__stderr__)


@contextlib.contextmanager
def answering(log: Path) -> Iterator[None]:
    """Within this block, append stacks to `log` when asked, unless somebody else has set a handler.

    Without a handler the signal would end the process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        yield
        return
    with open(log, "a", opener=restricted) as file:
        _install(file)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_DFL)


def _install(file: IO[str]) -> None:
    signal.signal(SIGNAL, lambda number, frame: _write_tasks(file))
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=True)


def watch_exit(after_s: float = 60.0) -> None:
    """Write the stacks of all threads to stderr if the exit of the interpreter takes longer than `after_s`.

    Call it last: an exit waits for threads, executors and functions of `atexit`, and prints nothing.
    """
    with contextlib.suppress(OSError, ValueError):  # a process without stderr
        os.fstat(_STDERR)
        # Only once: a dump while the interpreter frees its threads can end the process with a segfault.
        faulthandler.dump_traceback_later(after_s, file=_STDERR)


def ask(pids: Iterable[int]) -> list[int]:
    """Ask processes of this machine that handle the signal, which would end any other; return their pids."""
    asked = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            # psutil does not report who handles a signal.
            caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught is not None and int(caught[1], 16) >> (SIGNAL - 1) & 1:
                os.kill(pid, SIGNAL)
                asked.append(pid)
    return asked


def ask_children() -> list[int]:
    """Ask all processes below this one, and return the pids of processes that will write their stacks."""
    import psutil  # only needed here

    return ask(child.pid for child in psutil.Process().children(recursive=True))


def write_own(file: IO[str]) -> None:
    """Write the stacks of this process."""
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.write(_tasks())
    file.flush()


def _write_tasks(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk is reported where it matters
        file.write(_tasks())
        file.flush()


def _tasks() -> str:
    """Describe the asyncio tasks of the background loop and of the loop that runs in this thread."""
    loops = {async_utils.current_loop()}
    with contextlib.suppress(RuntimeError):
        loops.add(asyncio.get_running_loop())
    out = io.StringIO()
    for loop in loops - {None}:
        tasks: list[asyncio.Task[Any]] = []
        with contextlib.suppress(RuntimeError):  # the set of tasks changed while it was read
            tasks = list(asyncio.all_tasks(loop))
        out.write(f"asyncio tasks: {len(tasks)}\n")
        for task in tasks[:_MAX_TASKS]:
            task.print_stack(limit=_TASK_FRAMES, file=out)
    return out.getvalue()
