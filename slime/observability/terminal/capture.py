"""Sends everything that a process writes to stdout and stderr to a file, so that the screen stays intact.

Descriptors 1 and 2 refer to the file itself, so that output of C++ code, child processes and crashes is kept.
Output of Python code is also passed to a callback, which may show it.
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

OnText = Callable[[str], None]


class Capture:
    """A context that captures output. Before `into` names a file, output waits in a temporary one.

    `on_stdout`: called with what Python code prints to stdout. `stdout`, `stderr`: the original streams,
    which can be written to while the block runs.
    """

    def __init__(self, on_stdout: OnText | None = None) -> None:
        self._on_text = (on_stdout, None)
        self.is_open = False

    def __enter__(self) -> Capture:
        global _current
        self._before = (sys.stdout, sys.stderr)
        for stream in self._before:
            stream.flush()
        self._outside = {}
        for fd in (1, 2):
            with contextlib.suppress(OSError):  # it is closed
                self._outside[fd] = os.dup(fd)
        self.stdout, self.stderr = (_as_before(*pair) for pair in zip(self._before, (1, 2), strict=True))
        self._spool = tempfile.TemporaryFile()
        self._is_spooled = True
        self._log_fd = os.dup(self._spool.fileno())  # one descriptor number for whichever file is current
        self._redirect(self._log_fd)
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
        """Append output to a file, earlier captured output included; afterwards to the previous file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = restricted(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        earlier = None
        if self._is_spooled:
            self._is_spooled = False
            os.write(fd, os.pread(self._spool.fileno(), 1 << 24, 0))
        else:
            earlier = os.dup(self._log_fd)
        self._redirect(fd)
        os.close(fd)
        try:
            yield
        finally:
            if earlier is not None:
                self._redirect(earlier)
                os.close(earlier)

    def _redirect(self, fd: int) -> None:
        for place in (self._log_fd, *self._outside):
            if place != fd:
                os.dup2(fd, place)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            os.write(self._log_fd, text.encode("utf-8", errors="replace"))


_current: Capture | None = None  # descriptors belong to the whole process


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Log to a file while the block runs: all output if it is captured, otherwise log lines only."""
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
    """Joins text into lines for a callback; an overwritten line (\\r) is passed in its last state."""

    def __init__(self, on_line: OnText) -> None:
        self._on_line, self._lock, self._begun = on_line, threading.RLock(), ""

    def __call__(self, text: str) -> None:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._on_line(line.rsplit("\r", 1)[-1])


class _Printed(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr` while they are captured; afterwards it writes to them."""

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
        # A forked process must not draw on the screen.
        if self._on_text is not None and os.getpid() == self._pid:
            self._on_text(text)
        return len(text)

    def flush(self) -> None:
        if not self._capture.is_open:
            self._before.flush()


def _as_before(stream: TextIO, fd: int) -> TextIO:
    """Return a stream to the original target of a descriptor that is about to be redirected."""
    try:
        if stream.fileno() != fd:
            return stream
    except (OSError, ValueError, AttributeError):
        return stream
    return os.fdopen(os.dup(fd), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)
