"""Decides where the record of a run is written: in its folder, or on a local disk of the driver's host.

SQLite's write-ahead log needs memory that all its users share, which a network file system cannot give. So
the record of a run whose folder is on one is written to a local disk. A copy replaces `RUN/record.db` at
every checkpoint and at the end of the run, and a start on another host continues from it. Until the end
`RUN/record.json` names the host and the file that is written:

    {"host": "node-3", "file": "/tmp/slime-1000/math-5f1c0a92be-7d20c1/record.db", "folder": "/nfs/runs/math"}

The file has a new name in every start that continues from the copy, so an outdated file is never read.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import sqlite3
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from slime.record.schema import (
    PLACE_FILE,
    RECORD_FILE,
    RecordError,
    connect_for_reading,
    refuse_foreign,
    unusable,
)
from slime.utils.files.restricted import create_restricted

logger = logging.getLogger(__name__)

_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
_NETWORK |= {"panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs"}


@dataclass(frozen=True, slots=True)
class _Place:
    """The content of `record.json`: the host that writes the record, and the file and the folder there."""

    host: str
    file: str
    folder: str


def record_file(folder: Path) -> Path:
    """Return the file from which to read a run's record: other hosts than the driver's read the copy."""
    place = _place(folder)
    return Path(place.file) if place is not None and _is_here(place, folder) else folder / RECORD_FILE


def written_elsewhere(folder: Path) -> str | None:
    """Return the host that writes a run's record if only a copy can be read on this one."""
    place = _place(folder)
    return None if place is None or _is_here(place, folder) else place.host


def describe_copy(folder: Path) -> str | None:
    """Return how old the copy is that is read on this host; None: the record itself is read."""
    if (host := written_elsewhere(folder)) is None:
        return None
    found = None
    with contextlib.suppress(RecordError, sqlite3.Error), _open(folder / RECORD_FILE) as connection:
        found = connection.execute("SELECT value FROM meta WHERE key = 'copied'").fetchone()
    if found is None:
        return f"the record is on {host}; its first copy is made at the first checkpoint"
    copied = json.loads(found[0])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copied["time"]))
    return f"the record is on {host}; its copy here is as of step {copied['step']}, copied at {when}"


def prepare_record(folder: Path, run_id: str, local: str | None = None) -> Path:
    """Return the file that this start writes the record to, with everything that was recorded before.

    `local`: a folder on a local disk; None: one is used if the run's folder is on a network file system.
    RecordError: the record belongs to another run.
    """
    before, place, base = record_file(folder), _place(folder), _local_folder(folder, local)
    if base is None:
        if before.parent != folder:  # the run's folder was on a network file system before
            if not copy_record(before, folder):
                raise RecordError(f"{folder} has no room for the record, which is in {before}.")
            forget_local(before, folder)
        (folder / PLACE_FILE).unlink(missing_ok=True)
        return folder / RECORD_FILE
    if before.parent != folder:
        return before
    refuse_foreign(before, run_id)
    here = str(folder.resolve())
    name = f"{folder.name}-{hashlib.sha256(here.encode()).hexdigest()[:10]}"
    for outdated in base.glob(f"{name}-*"):  # of starts before the one that wrote the copy
        shutil.rmtree(outdated, ignore_errors=True)
    file = base / f"{name}-{secrets.token_hex(3)}" / RECORD_FILE
    file.parent.mkdir()
    if before.exists():
        create_restricted(file)
        try:
            with _open(before) as source, contextlib.closing(sqlite3.connect(file)) as connection:
                source.backup(connection)
        except sqlite3.Error as error:
            raise unusable(before, "read", error) from error
    host = socket.gethostname()
    _write(folder / PLACE_FILE, json.dumps(asdict(_Place(host, str(file), here))))
    logger.info("The record is written to %s on %s; %s gets a copy at every checkpoint.", file, host, folder)
    if place is not None:
        logger.warning(
            "%s had the record of this run: it continues from the copy; what came after that is made again.",
            place.host,
        )
    return file


def copy_record(file: Path, folder: Path) -> bool:
    """Replace the copy in the run's folder by one of the present record; return whether it could be written.

    The copy is made on the local disk, and written to the shared folder from beginning to end.
    """
    copy, part = file.with_name("copy.db"), folder / f"{RECORD_FILE}.part"
    try:
        copy.unlink(missing_ok=True)
        with _open(file) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        with contextlib.closing(sqlite3.connect(copy)) as connection, connection:
            query = "SELECT rollout FROM ledger WHERE event = 'consumed' ORDER BY id DESC LIMIT 1"
            (step,) = connection.execute(query).fetchone() or (-1,)
            about = json.dumps({"step": step + 1, "time": time.time()})
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('copied', ?)", (about,))
        create_restricted(part)
        shutil.copyfile(copy, part)
        _sync_and_rename(part, folder / RECORD_FILE)
        for kind in ("wal", "shm"):  # of an earlier version of slime, which wrote the record there
            (folder / f"{RECORD_FILE}-{kind}").unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        logger.warning(
            "The record could not be copied from %s to %s (%s): a start on another host would continue "
            "from the copy before. The run continues.",
            *(file, folder, error),
        )
        part.unlink(missing_ok=True)
        return False
    finally:
        copy.unlink(missing_ok=True)
    return True


def forget_local(file: Path, folder: Path) -> None:
    """Let the copy in the run's folder be the record, and remove the local one, which equals it."""
    (folder / PLACE_FILE).unlink(missing_ok=True)
    shutil.rmtree(file.parent, ignore_errors=True)


def file_system_of(path: Path) -> str | None:
    """Return the type of the file system that holds a path, such as ext4 or nfs4; None: it is not known."""
    found, longest = None, -1
    for mount in psutil.disk_partitions(all=True):
        depth = len(Path(mount.mountpoint).parts)
        if depth >= longest and path.resolve().is_relative_to(mount.mountpoint):
            found, longest = mount.fstype, depth
    return found


def is_network(file_system: str | None) -> bool:
    """Return whether several hosts may share a file system of this type."""
    kind = file_system or ""
    return kind not in _LOCAL_FUSE and (kind in _NETWORK or kind.startswith("fuse."))


def _local_folder(folder: Path, given: str | None) -> Path | None:
    """Return the folder of records on this host's disk; None: the run's own folder is to hold its record."""
    if given is not None:
        base = Path(given)
        try:
            base.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=base))
        except OSError as error:
            raise RecordError(
                f"--record-dir {given!r} cannot be written ({error.strerror}): give a folder on a local disk."
            ) from None
        return base
    kind = file_system_of(folder)
    if not is_network(kind):
        return None
    base = Path(tempfile.gettempdir(), f"slime-{os.getuid()}")
    if is_network(file_system_of(base.parent)):
        logger.warning(
            "%s is on a network file system (%s), where a record may be damaged, and so is %s. "
            "Give a folder on a local disk: --record-dir.",
            *(folder, kind, base.parent),
        )
        return None
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise RecordError(f"{base} belongs to another user: give a folder on a local disk: --record-dir.")
    return base


def _open(file: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(connect_for_reading(file))


def _place(folder: Path) -> _Place | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return _Place(**json.loads((folder / PLACE_FILE).read_text()))
    return None


def _is_here(place: _Place, folder: Path) -> bool:
    """Return whether this host has the file. A copy of a run's folder is not the folder that it was."""
    return place.folder == str(folder.resolve()) and Path(place.file).is_file()


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    _sync_and_rename(part, path)


def _sync_and_rename(part: Path, path: Path) -> None:
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
