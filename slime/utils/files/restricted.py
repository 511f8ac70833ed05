"""Creates files that other users of the machine may not read: logs, the record of a run, tokens."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

FOR_GROUP = 0o640  # logs and the record: they hold prompts and responses
FOR_OWNER = 0o600  # tokens


def restricted(path: str | os.PathLike[str], flags: int, at_most: int = FOR_GROUP) -> int:
    """Open a file with no more permissions than `at_most`; the user's umask may take more away.

    An existing file loses further permissions. The signature is that of an `opener` of `open`.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, at_most)
    _narrow(fd, at_most)
    return fd


def create_restricted(path: Path, at_most: int = FOR_GROUP) -> None:
    """Make sure that a file exists and has no more permissions than `at_most`."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, at_most))
    except FileExistsError:
        _narrow(path, at_most)  # by its path: closing a descriptor of it would drop SQLite's locks


def _narrow(file: int | Path, at_most: int) -> None:
    with contextlib.suppress(OSError):  # somebody else owns the file
        mode = os.stat(file).st_mode
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~at_most:
            os.chmod(file, stat.S_IMODE(mode) & at_most)
