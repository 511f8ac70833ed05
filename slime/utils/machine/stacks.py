"""Where every thread and every asyncio task of a process stands, written to its log when somebody asks.

A signal asks (SIGUSR2). The interpreter itself answers it, so that a process that hangs inside a C call or
holds Python's lock tells its threads too; its asyncio tasks follow as soon as any Python runs in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from slime.utils import async_utils
from slime.utils.files.restricted import restricted

SIGNAL = signal.SIGUSR2
_STDERR = 2  # the descriptor: the file object may be closed when the interpreter exits
_TASK_FRAMES = 8
_MAX_TASKS = 200
_PATIENCE_S = 5.0
_SAME_QUESTION_S = 0.5
_telling = threading.Lock()
_last_told = float("-inf")
_dependents: list[Callable[[], None]] = []


def answer_signal() -> None:
    """From now on this process writes its stacks to stderr, its log, when it is asked to."""
    stderr = sys.__stderr__
    if stderr is None or threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(ValueError, OSError, io.UnsupportedOperation):  # a stderr that is no file
        # For a main thread that runs an event loop of its own, which then has the other end of signals.
        signal.signal(SIGNAL, lambda number, frame: _tell_tasks())
        faulthandler.register(SIGNAL, file=stderr, all_threads=True, chain=True)
        # For one that stands in a collective: Python runs no handler while it does.
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
        threading.Thread(target=_tell_when_asked, args=(ours,), name="stacks", daemon=True).start()


@contextlib.contextmanager
def answering(log: Path) -> Iterator[None]:
    """Within this block the process writes its stacks to the end of a file when it is asked to; the signal
    would end it. A handler that somebody else has set stays.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        yield
        return
    with open(log, "ab", buffering=0, opener=restricted) as file:

        def tell_tasks(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):  # a full disk is told where it matters
                file.write(_tasks().encode(errors="replace"))

        signal.signal(SIGNAL, tell_tasks)
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_DFL)


def watch_exit(after_s: float = 60.0) -> None:
    """Write the stacks of all threads to stderr if the exit of the interpreter takes longer than `after_s`.

    Call it last. An exit waits for every thread that is not a daemon, for executors and for functions of
    `atexit`; without this, a process that never ends prints nothing. It does not end the process.
    """
    with contextlib.suppress(OSError, ValueError):  # a process without stderr
        os.fstat(_STDERR)
        # Only once: a dump while the interpreter frees its threads can end the process with a segfault.
        faulthandler.dump_traceback_later(after_s, file=_STDERR)


def ask(pids: Iterable[int]) -> list[int]:
    """Asks processes of this machine; returns those that will answer. The signal would end any other."""
    asked = []
    for pid in pids:
        if _answers(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, SIGNAL)
                asked.append(pid)
    return asked


def write_own(file: TextIO) -> None:
    """The stacks of this process, for whoever runs when others do not; what it looks after is asked too."""
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.write(_tasks())
    file.flush()
    # On threads of their own: who hangs must not keep the rest from being told.
    asking = [threading.Thread(target=dependent, name="stacks", daemon=True) for dependent in _dependents]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(_PATIENCE_S)


def pass_on(ask_dependents: Callable[[], None]) -> Callable[[], None]:
    """Processes that this one looks after are asked with it, by this function; returns what takes it back."""
    _dependents.append(ask_dependents)
    return lambda: _dependents.remove(ask_dependents)


def _tell_when_asked(signals: socket.socket) -> None:
    while numbers := signals.recv(64):
        if SIGNAL in numbers:
            _tell_tasks()


def _tell_tasks() -> None:
    """Writes the stacks of asyncio's tasks: once for each question, although two handlers may hear it."""
    global _last_told
    with _telling:
        if time.monotonic() - _last_told < _SAME_QUESTION_S:
            return
        _last_told = time.monotonic()
    if sys.__stderr__ is not None:
        sys.__stderr__.write(_tasks())
        sys.__stderr__.flush()


def _tasks() -> str:
    """The asyncio tasks of this process: of its background loop, and of the one that runs in this thread."""
    loops = {async_utils.current_loop()}
    with contextlib.suppress(RuntimeError):
        loops.add(asyncio.get_running_loop())
    out = io.StringIO()
    for loop in loops - {None}:
        tasks: list[asyncio.Task[object]] = []
        with contextlib.suppress(RuntimeError):  # the set of tasks changed while it was read
            tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        out.write(f"asyncio tasks: {len(tasks)}\n")
        for task in tasks[:_MAX_TASKS]:
            out.write(f"{task.get_name()} waits:\n")
            for place in task.get_stack(limit=_TASK_FRAMES):
                code = place.f_code
                out.write(f"  File {code.co_filename}, line {place.f_lineno} in {code.co_qualname}\n")
    return out.getvalue()


def _answers(pid: int) -> bool:
    """Whether a process has a handler of its own for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
