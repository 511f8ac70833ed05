"""Detects a user function that has closed the file descriptors of the run that called it.

A function that closes "all" descriptors (3 to 200, say) closes the run's sockets, pipes and files too: no
event loop runs after that, and no error would reach anybody. The state of one unused pipe reveals it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from slime.utils.files.restricted import restricted
from slime.utils.machine.open_files import raise_limit

_STDERR = 2
_FAR_AWAY = 4000  # a number that loops over descriptors seldom reach


class _Watched:
    """The watched state. `pipe`: number and inode of a descriptor; None: nothing is watched."""

    pipe: tuple[int, int] | None = None
    terminal: int = _STDERR
    error_file: Path | None = None


@contextlib.contextmanager
def watching(error_file: Path) -> Iterator[None]:
    """Watch the descriptors of this process; what a breach prints is also written to `error_file`."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # without stderr nobody reads
        far = min(_FAR_AWAY, raise_limit() - 64)
        _Watched.terminal = fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, far)
    _Watched.pipe, _Watched.error_file = (reading, os.fstat(reading).st_ino), error_file
    try:
        yield
    finally:
        _forget()
        for number in {reading, writing, _Watched.terminal} - {_STDERR}:
            with contextlib.suppress(OSError):
                os.close(number)
        _Watched.terminal = _STDERR


def check(*name: str) -> None:
    """Call it after the user function `name`: it ends the process if the descriptors are gone."""
    if _Watched.pipe is None:
        return
    number, inode = _Watched.pipe
    with contextlib.suppress(OSError):
        if os.fstat(number).st_ino == inode:
            return
    text = (
        f"error: {' '.join(name)} closed file descriptors that are not its own (number {number} is one): "
        "they are the sockets, pipes and files of the run, which cannot continue. Close only what the "
        "function opened itself. A run with checkpoints continues from the last one.\n"
    )
    with contextlib.suppress(OSError):
        os.write(_Watched.terminal, text.encode(errors="replace"))
    if _Watched.error_file is not None:
        with contextlib.suppress(OSError), open(_Watched.error_file, "a", opener=restricted) as file:
            file.write(text)
    os._exit(1)  # no cleanup works without descriptors; children end with the pipes to them


def _forget() -> None:
    _Watched.pipe = None


os.register_at_fork(after_in_child=_forget)
