"""Locks a folder for one process; the system releases the lock when its holder ends in any way.

The filelock package is no replacement: it truncates the lock file, which contains the holder's name, when it
opens it, and it cannot check a lock in a read-only folder.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from slime.utils.errors import FolderInUse

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_GRACE_S = 2.0  # wait for a living holder, which may be about to end
_DEAD_HOLDER_S = 60.0  # wait for the children of a killed holder, which end soon after it
_POLL_S = 0.1


class FolderLock:
    """A lock held until `release` or the end of the process; others that want it get `FolderInUse`.

    `release` removes the file. A process that waited then holds the lock of a removed file, and tries again.
    """

    def __init__(self, folder: Path, flag: str):
        self._folder, self._flag, self._path = folder, flag, lock_file(folder, flag)
        started = time.monotonic()
        self._fd: int | None = None
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._wait(fd, started)
                if _is_at(fd, self._path):
                    self._fd, fd = fd, -1
            finally:
                if fd >= 0:
                    os.close(fd)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Release the lock; calling it again does nothing."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    def _wait(self, fd: int, started: float) -> None:
        while not self._try(fd):
            holder = _read(os.pread(fd, 4096, 0))
            pid = _pid_here(holder)
            is_gone = pid is not None and not psutil.pid_exists(pid)  # only its children hold the lock
            patience_s = _DEAD_HOLDER_S if is_gone else _GRACE_S
            if time.monotonic() - started > patience_s:
                raise FolderInUse(
                    f"{self._flag} {self._folder} is in use by process {holder.get('pid')} on "
                    f"{holder.get('host')}: two runs in one folder would mix; wait for its end, or give "
                    "another folder."
                )
            time.sleep(_POLL_S)

    def _try(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            message = "%s %s is on a file system without locks: a second run in it would not be noticed."
            logger.warning(message, self._flag, self._folder)
        return True


def lock_file(folder: Path, flag: str) -> Path:
    """Return the lock file for one use of a folder: a run may save into its own folder."""
    return folder / f".{flag.removeprefix('--')}.lock"


def is_locked(folder: Path, flag: str) -> bool:
    """Return whether a process holds the lock of a folder now."""
    try:
        with open(lock_file(folder, flag), "rb") as file:  # read-only: the caller may not have write access
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def holder_here(folder: Path, flag: str) -> int | None:
    """Return the process that claims to hold the lock; None: it is on another machine, or unknown."""
    with contextlib.suppress(OSError):
        return _pid_here(_read(lock_file(folder, flag).read_bytes()))
    return None


def refuse_locked(folder: Path, flag: str) -> None:
    """Raise `FolderInUse` if another process holds the lock of a folder and does not release it soon."""
    if is_locked(folder, flag):
        FolderLock(folder, flag).release()


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the opened file still has that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read(text: bytes) -> dict[str, Any]:
    """Return who holds the lock; empty while the holder is writing that."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}


def _pid_here(holder: dict[str, Any]) -> int | None:
    return holder.get("pid") if holder.get("host") == socket.gethostname() else None
