"""A reward check worker: a small process that runs one check at a time and answers over a pipe.

Started by `pool.CheckPool` as a script, so that nothing heavy is imported: only what the checks themselves need.
For each request it answers twice: "ready" once the function is imported (imports are slow and are not the check's
fault), then "ok" with the value or "error" with the text of the exception.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_MEMORY_LIMIT_BYTES = 8 << 30  # a runaway expression ends as MemoryError, not as a dead machine
_GRACE_S = 5.0


def main() -> None:
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent_pid)
    sys.path[0] = os.getcwd()  # the script's own folder would shadow top-level names (`math_utils`, `worker`)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    connection = Connection(fd)
    while True:
        try:
            path, arguments, deadline_s = connection.recv()
        except (EOFError, OSError):
            return  # the pool is gone
        _answer(connection, path, arguments, deadline_s)


def _die_with(parent_pid: int) -> None:
    # A check stuck inside a C call holds the interpreter, so no watching thread would run: the kernel must do it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _answer(connection: Connection, path: str, arguments: tuple[Any, ...], deadline_s: float) -> None:
    try:
        function = _load(path)
    except Exception as error:
        connection.send(("unloadable", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", None))
    # Second line of defence, for a parent that cannot kill: the default action of SIGALRM ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s + _GRACE_S)
    try:
        reply = ("ok", function(*arguments))
    except Exception as error:
        reply = ("error", f"{type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        connection.send(reply)
    except (TypeError, AttributeError, ValueError) as error:  # a value that cannot be pickled
        connection.send(("error", f"returned a value that cannot be sent back: {error}"))


@functools.cache
def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main()
