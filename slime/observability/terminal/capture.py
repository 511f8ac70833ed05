"""Keeps all that a process writes to stdout and stderr in a file, so that it does not tear what is shown.

Descriptors 1 and 2 lead straight to the file: what C++ code, child processes or a crash write is never lost
on the way. What Python code prints is also handed on to whoever shows it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from slime.observability.logging_utils import FORMAT
from slime.utils.files.restricted import create_restricted, restricted

_TAIL_BYTES = 4000

OnText = Callable[[str], None]


class Capture:
    """A context. Until a file is named (`log_to`), what is written waits in one without a name.

    `on_stdout`, `on_stderr`: get what Python code prints, as it comes. `stdout`, `stderr`: the streams as
    they were before, to be written to while the block runs.
    """

    def __init__(self, on_stdout: OnText | None = None, on_stderr: OnText | None = None) -> None:
        self._on_text = (on_stdout, on_stderr)
        self.is_open = False

    def __enter__(self) -> Capture:
        global _current
        self._before = (sys.stdout, sys.stderr)
        for stream in self._before:
            stream.flush()
        self._outside = {fd: os.dup(fd) for fd in (1, 2) if _is_open(fd)}
        self.stdout, self.stderr = (_as_before(*pair) for pair in zip(self._before, (1, 2), strict=True))
        self._spool = tempfile.TemporaryFile()
        self._is_spooled = True
        self._log_fd = os.dup(self._spool.fileno())  # one number, whatever file it stands for
        self._lead_to(self._log_fd)
        sys.stdout, sys.stderr = (
            _Printed(self, stream, on_text)
            for stream, on_text in zip(self._before, self._on_text, strict=True)
        )
        self._outer, _current, self.is_open = _current, self, True
        return self

    def __exit__(self, *exc: object) -> None:
        global _current
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.is_open, _current = False, self._outer
        sys.stdout, sys.stderr = self._before
        for fd, outside in self._outside.items():
            os.dup2(outside, fd)
            os.close(outside)
        os.close(self._log_fd)
        self._spool.close()
        for stream, before in zip((self.stdout, self.stderr), self._before, strict=True):
            if stream is not before:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()

    @contextlib.contextmanager
    def into(self, path: Path) -> Iterator[None]:
        """What is written goes to the end of a file, with what had none; then to the file of before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = restricted(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        earlier = None
        if self._is_spooled:
            self._is_spooled = False
            os.write(fd, os.pread(self._spool.fileno(), 1 << 24, 0))
        else:
            earlier = os.dup(self._log_fd)
        self._lead_to(fd)
        os.close(fd)
        try:
            yield
        finally:
            if earlier is not None:
                self._lead_to(earlier)
                os.close(earlier)

    def _lead_to(self, fd: int) -> None:
        for place in (self._log_fd, *self._outside):
            if place != fd:
                os.dup2(fd, place)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is told where it matters
            os.write(self._log_fd, text.encode("utf-8", errors="replace"))

    def unnamed_tail(self) -> str:
        """The end of what was written while no file was named; nothing once there is one."""
        if not self._is_spooled:
            return ""
        size = os.fstat(self._spool.fileno()).st_size
        return os.pread(self._spool.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(
            errors="replace"
        )


_current: Capture | None = None  # descriptors belong to the whole process


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """The log of this process is in that file while the block runs: all it writes where that is captured, or
    else its log lines.
    """
    if _current is not None:
        with _current.into(path):
            yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    create_restricted(path)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT.format(prefix=""), datefmt="%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


class Lines:
    """Takes text as it comes and hands on whole lines; of one that was written over, the last state."""

    def __init__(self, on_line: OnText) -> None:
        self._on_line, self._lock, self._begun = on_line, threading.RLock(), ""

    def __call__(self, text: str) -> None:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._on_line(line.rsplit("\r", 1)[-1])


class _Printed(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` while they are captured; afterwards it passes all on to them."""

    def __init__(self, capture: Capture, before: TextIO, on_text: OnText | None) -> None:
        self._capture, self._before, self._on_text, self._pid = capture, before, on_text, os.getpid()

    encoding = "utf-8"
    errors = "replace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._before.fileno()

    def write(self, text: str) -> int:
        if not self._capture.is_open:
            return self._before.write(text)
        self._capture.write(text)
        # A process that was forked has no part in what is shown.
        if self._on_text is not None and os.getpid() == self._pid:
            self._on_text(text)
        return len(text)

    def flush(self) -> None:
        if not self._capture.is_open:
            self._before.flush()


def _as_before(stream: TextIO, fd: int) -> TextIO:
    """A stream that leads where this one did before its descriptor was led elsewhere."""
    try:
        if stream.fileno() != fd:
            return stream
    except (OSError, ValueError, AttributeError):
        return stream
    return os.fdopen(os.dup(fd), "w", encoding=stream.encoding, errors="replace", buffering=1)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
