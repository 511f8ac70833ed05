"""A reward check worker: a small process that runs one check at a time and replies over a pipe.

Started by `pool.CheckPool` as a script, so that nothing heavy is imported: only what the checks themselves
need. For each request it answers twice: ("ready", pid) once the function is imported, then one of

    ("ok", value)             what the check returned
    ("too large", reason)     the check gave the answer up: its size, depth or digits are beyond the limits
    ("exhausted", reason)     the check used up its CPU time or memory: this process is spent
    ("error", reason)         the check raised

If imports took long, the process that has done them forks: the child serves, and if a check in it is
interrupted, another child replaces it at once.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1
_MEMORY_LIMIT_BYTES = 8 << 30  # a runaway expression ends as MemoryError, not as a dead machine
_GRACE_S = 5.0
_SPENT = 77  # exit status of a child whose last check was broken off
_REMINDER_S = 0.1  # of CPU: a library may swallow the first word that time is up


class _OutOfTime(BaseException):
    """Not a subclass of Exception, so that handlers in a check do not catch it."""


_running = False  # a check; a signal that comes late must not end anything else


def _on_time_up(signum: int, frame: FrameType | None) -> None:
    if _running:
        raise _OutOfTime


def _within_budget(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """Break a check off, wherever its Python code stands, once it has used up its CPU time.

    CPU time, not time on the clock: on a busy machine an answer is judged as on an idle one. What hangs
    inside one C call is not reached; the pool kills it at the deadline.
    """
    global _running
    _running = True
    signal.setitimer(signal.ITIMER_PROF, seconds, _REMINDER_S)
    try:
        return function(*arguments)
    finally:
        _running = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent_pid)
    sys.path[0] = os.getcwd()  # the script's own folder would shadow top-level names (`math_utils`, `worker`)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # `ulimit -v`: nobody may take more than that
    most = _MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _Worker(Connection(fd)).serve()


def _die_with(parent_pid: int) -> None:
    # A check stuck inside a C call holds the interpreter: only the kernel can end it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


class _Worker:
    """Serves one connection, in this process or in children that it forks."""

    def __init__(self, connection: Connection):
        self._connection = connection
        signal.signal(signal.SIGPROF, _on_time_up)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._warm: set[str] = set()  # modules that had a warm-up
        self._is_child = False

    def serve(self) -> None:
        while True:
            try:
                path, arguments, deadline_s, cpu_s = self._connection.recv()
            except (EOFError, OSError):
                return  # the pool is gone
            if path not in self._functions and not self._load(path):
                continue
            self._connection.send(("ready", os.getpid()))
            self._run(self._functions[path], arguments, deadline_s, cpu_s)

    def _load(self, path: str) -> bool:
        """Return whether the request that named the function is to be served."""
        module_name, _, name = path.partition(":")
        try:
            module = importlib.import_module(module_name)
            self._functions[path] = getattr(module, name)
            if module_name in self._warm or not hasattr(module, "warm_up"):
                return True
            module.warm_up()
            self._warm.add(module_name)
        except Exception as error:
            self._connection.send(("unloadable", f"{type(error).__name__}: {error}"))
            return False
        return self._become_template()

    def _become_template(self) -> bool:
        """Fork children: return True in the first, False in each replacement; this process only waits."""
        template_pid, is_first = os.getpid(), True
        while (child_pid := os.fork()) != 0:
            is_first = False
            _, status = os.waitpid(child_pid, 0)
            if os.waitstatus_to_exitcode(status) != _SPENT:
                os._exit(1)  # the pool is gone, or the child broke: the pool sees the end of the pipe
        _die_with(template_pid)
        self._is_child = True
        return is_first

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], deadline_s: float, cpu_s: float
    ) -> None:
        # Second line of defence, for a parent that cannot kill: by default SIGALRM ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, deadline_s + _GRACE_S)
        kind, value = _outcome(function, arguments, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, 0)
        spent = kind == "exhausted" and self._is_child
        try:
            self._connection.send(("too large" if spent else kind, value))
        except (TypeError, AttributeError, ValueError) as error:  # a value that cannot be pickled
            self._connection.send(("error", f"returned a value that cannot be sent back: {error}"))
        if spent:
            os._exit(_SPENT)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
    from slime.rollout.rm_hub.workers import limits  # here: `main` first sets the search path

    limits.take_note()  # of an earlier check
    try:
        value = _within_budget(function, arguments, seconds)
        note = limits.take_note()
        return ("too large", note) if note is not None and not value else ("ok", value)
    except _OutOfTime:
        return "exhausted", f"it took more than {seconds:g} s of CPU time"
    except MemoryError:
        return "exhausted", "it took too much memory"
    except (limits.TooLarge, RecursionError, OverflowError) as error:
        return "too large", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
