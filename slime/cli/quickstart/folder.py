"""The quick start's folder: files of an earlier quick start are moved aside, never deleted."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.utils.files.folder_lock import FolderLock

# What a quick start writes.
OWNED = ("data", "model", "sft", "rl", "summary.json", "curve.png", "log.txt", "error.txt")
MADE_BY_ONE = ("log.txt", "summary.json")  # the first and the last thing that it writes


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path | None]:
    """Lock the folder for this quick start; yields the folder that an earlier one was moved to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--run-dir {folder} cannot be written to: {error.strerror}.") from None
    lock = FolderLock(folder, "--run-dir")
    try:
        yield set_aside(folder)
    finally:
        lock.release()


def set_aside(folder: Path) -> Path | None:
    """Move an earlier quick start aside and return its new folder; None if there was none.

    Names such as `data` are common: what no quick start made is refused rather than moved.
    """
    found = [folder / name for name in OWNED if (folder / name).exists()]
    if not found:
        return None
    if not any((folder / name).exists() for name in MADE_BY_ONE):
        name = f"{found[0].name}/" if found[0].is_dir() else found[0].name
        raise ValueError(f"--run-dir {folder} holds {name}, which no quick start made; give another folder.")
    taken = [int(path.name) for path in folder.glob("earlier/*") if path.name.isdigit()]
    target = folder / "earlier" / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    return target
