"""Shares blocks of bytes between processes of one machine: files in memory, cleaned up by name prefix.

A segment's name starts with the run's prefix (`slime-<pid of the driver>-...`). After a crash any surviving
process can therefore remove all of them, and the next start removes those whose driver is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def make_prefix() -> str:
    """Return a prefix for this driver process; two runs on one machine never share it."""
    return f"slime-{os.getpid()}-{secrets.token_hex(3)}"


def hold(prefix: str) -> Callable[[], None]:
    """Lock the prefix of a run that is alive: containers may share the memory and not the processes of a
    machine.

    The lock ends with this process, or by the returned function.
    """
    fd = os.open(_lock_of(prefix), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lambda: os.close(fd)


def _lock_of(prefix: str) -> Path:
    return FOLDER / f"{prefix}-held"


def _is_held(prefix: str) -> bool:
    try:
        with open(_lock_of(prefix), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)  # it is held, or another user's
    return False


class Segment:
    """A mapped file. `buffer` is a uint8 tensor over the bytes, shared with all who open the name."""

    def __init__(self, name: str, mapping: mmap.mmap, nbytes: int):
        self.name = name
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        import torch  # imported here: listing or removing segments does not need it

        self.buffer = (
            torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0).byte()
        )

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    def is_published(self) -> bool:
        """Return whether other processes find the segment: its file may have been removed."""
        try:
            return self.path.stat().st_size >= self.nbytes
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the mapping; the memory is freed with the last tensor over it."""
        self.buffer = self.buffer.new_empty(0)
        self._mapping = None

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def create_segment(nbytes: int, prefix: str) -> Segment:
    """Create a writable segment of zeros."""
    name = f"{prefix}-{secrets.token_hex(6)}"
    path = FOLDER / name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Reserve now: a sparse file would raise SIGBUS at the first write once the memory is full.
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        mapping = mmap.mmap(fd, max(nbytes, 1))
    except OSError as error:
        path.unlink(missing_ok=True)
        # The folder is the error's file name, which survives pickling: the end of the run reports it.
        reason = f"{error.strerror}: no room for a segment of {nbytes} bytes"
        raise OSError(error.errno, reason, str(FOLDER)) from error
    finally:
        os.close(fd)
    return Segment(name, mapping, nbytes)


def open_segment(name: str) -> Segment:
    """Open an existing segment. The name must be a bare one: a path would reach outside the shared folder."""
    if "/" in name or not name.startswith("slime-"):
        raise ValueError(f"{name!r} is not the name of a shared segment")
    try:
        with open(FOLDER / name, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
    except FileNotFoundError:
        raise FileNotFoundError(f"shared segment {name} does not exist (its owner may have gone)") from None
    return Segment(name, mapping, len(mapping))


def list_segments(prefix: str) -> list[str]:
    return sorted(p.name for p in FOLDER.glob(f"{prefix}-*"))


def unlink_prefix(prefix: str) -> None:
    """Remove every segment and folder of a run; safe to call from several processes at once."""
    for path in FOLDER.glob(f"{prefix}-*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unlink_stale() -> list[str]:
    """Remove segments whose driver process no longer exists; return their names. Other users' stay."""
    removed = []
    for path in FOLDER.glob("slime-*-*"):
        parts = path.name.split("-")
        if not parts[1].isdigit() or psutil.pid_exists(int(parts[1])) or _is_held("-".join(parts[:3])):
            continue
        with contextlib.suppress(PermissionError):
            _remove(path)
            removed.append(path.name)
    return removed
