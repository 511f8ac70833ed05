"""Opens `record.db` for the one writer or for a reader, and checks its schema."""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from slime.record import convert_old
from slime.record.tables import SCHEMA_NUMBER, create_tables
from slime.utils.files.restricted import create_restricted
from slime.utils.files.run_file import read_run

logger = logging.getLogger(__name__)

RECORD_FILE = "record.db"
PLACE_FILE = "record.json"  # beside a copy of the record: slime.record.place
_OLDER = ("1", "2", "3", "4", "5")  # slime.record.convert_old
_TABLES_OF_ONE_RUN = ("ledger", "ledger_finished", "ledger_episodes", "ledger_rollouts", "spans", "actions")
_BUSY_S = 30.0  # how long a statement waits for another process's lock
_MOST = (1 << 63) - 1  # the largest integer of SQLite; with a larger one it raises OverflowError
# Errors of reading a damaged file. The last one: names of tables are not valid text.
READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)


class RecordError(ValueError):
    """The record of a run cannot be read or written. The message says why."""


class EmptyRecord(RecordError):
    """There is no record, or it is empty."""


def create_or_open(path: Path, run_id: str) -> sqlite3.Connection:
    """Open the record for its one writer, and convert it if an older version of slime wrote it.

    RecordError: the file belongs to another run, or has an unknown schema. Such a file is never changed.
    """
    refuse_foreign(path, run_id)
    _know_numpy()
    try:
        create_restricted(path)
        for kept in (path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm")):
            if kept.exists():  # files of an earlier start; SQLite creates new ones with the record's mode
                create_restricted(kept)
    except OSError as error:
        raise RecordError(f"{path} cannot be opened: {error}.") from error
    connection = _connect(f"{path.resolve().as_uri()}?mode=rw", path)
    with _closed_on_error(connection, path, "written"):
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if _is_new(connection):
            with connection:  # one transaction: a run that is killed here leaves no tables
                connection.execute("BEGIN IMMEDIATE")
                create_tables(connection)
                values = (str(SCHEMA_NUMBER), run_id)
                connection.execute("INSERT INTO meta VALUES ('schema', ?), ('run', ?)", values)
        if _check_schema(connection, path) in _OLDER:
            logger.info("converting %s, which an older version of slime wrote", path)
            convert_old.convert(connection)
        create_tables(connection)  # those of this version that the file lacks
        if _check_owner(connection, path, run_id) != run_id:
            with connection:  # a run that ended before its first rollout has no data to keep
                for table in _TABLES_OF_ONE_RUN:
                    connection.execute(f"DELETE FROM {table}")
                connection.execute("DELETE FROM meta WHERE key LIKE 'missed%'")
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('run', ?)", (run_id,))
    return connection


@contextlib.contextmanager
def _closed_on_error(connection: sqlite3.Connection, path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (*READ_ERRORS, RecordError) as error:
        connection.close()
        if isinstance(error, RecordError):
            raise
        raise unusable(path, what, error) from error


def _know_numpy() -> None:
    """Let SQLite store numpy's numbers, with which users' data sources may count."""
    for kind in np.sctypeDict.values():
        if issubclass(kind, (np.integer, np.bool_)):
            sqlite3.register_adapter(kind, int)
        elif issubclass(kind, np.floating):
            sqlite3.register_adapter(kind, float)


def forget_groups(connection: sqlite3.Connection, rollout: int) -> None:
    """Remove the groups of a rollout's row, and everything that refers to them."""
    groups = "(SELECT id FROM groups WHERE rollout = ?)"
    samples = f"(SELECT id FROM samples WHERE group_row IN {groups})"
    for query in (
        f"DELETE FROM advantages WHERE sample IN {samples}",
        f"DELETE FROM samples WHERE group_row IN {groups}",
        f"DELETE FROM images WHERE group_row IN {groups}",
        "DELETE FROM groups WHERE rollout = ?",
    ):
        connection.execute(query, (rollout,))


def refuse_foreign(path: Path, run_id: str) -> None:
    """Raise a RecordError where the file belongs to another run or has an unknown schema.

    The file is opened for reading only, because opening it for writing already changes its first page.
    """
    _refuse_no_file(path)
    if not path.exists() or not path.stat().st_size:
        return
    connection = _connect(f"{path.resolve().as_uri()}?mode=ro{_unlocked(path)}", path)
    try:
        if _is_new(connection):  # or its tables were lost with the write-ahead log
            return
        _check_schema(connection, path)
        _check_owner(connection, path, run_id)
    except sqlite3.OperationalError:  # reported when it is opened for writing
        pass
    except READ_ERRORS as error:
        raise unusable(path, "written", error) from error
    finally:
        connection.close()


def _check_owner(connection: sqlite3.Connection, path: Path, run_id: str) -> str:
    """Return the run that owns the record. RecordError: it is another run, and the record has its samples."""
    (owner,) = connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone() or ("unknown",)
    if owner != run_id and connection.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone():
        raise RecordError(
            f"{path} is the record of run {owner}, this is {f'run {run_id}' if run_id else 'a new run'}; use "
            "another folder, or move the file away."
        )
    return str(owner)


def _refuse_no_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise RecordError(f"{path} is not a file, and the run writes its record there: move it away.")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the record for a reader, during the run or after it. Its folder need not be writable.

    A record that an older version of slime wrote is converted in memory, as it is now.
    """
    connection = connect_for_reading(path)
    with _closed_on_error(connection, path, "read"):
        if _check_schema(connection, path) not in _OLDER:
            return connection
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    with contextlib.closing(connection), _closed_on_error(copy, path, "read"):
        connection.backup(copy)
        convert_old.convert(copy)
    return copy


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """Open a record of any version for reading, without locks if it is a copy, which is never changed."""
    _refuse_no_file(path)
    if not path.exists():
        raise EmptyRecord(f"{path} does not exist: {_why_absent(path)}.")
    uri = path.resolve().as_uri()
    connection = _connect(f"{uri}?mode=ro{_unlocked(path)}", path)
    try:
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:  # a read-only folder: SQLite cannot create its index file
        connection.close()
        connection = _connect(f"{uri}?mode=ro&immutable=1", path)
    except READ_ERRORS:
        pass  # reported when it is used
    return connection


def _unlocked(path: Path) -> str:
    return "&immutable=1" if path.with_name(PLACE_FILE).exists() else ""


class Reader:
    """An open record, which may stay open during the run. Close it, or use it in a `with`."""

    def __init__(self, path: Path):
        self._path, self._connection = path, open_for_reading(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Report a damaged file that is detected only while it is read."""
        try:
            yield
        except (*READ_ERRORS, ValueError, TypeError, AttributeError) as error:
            raise unusable(self._path, "read", error) from error

    def _ask(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        held = [max(-_MOST, min(v, _MOST)) if type(v) is int else v for v in values]
        with self._reading():
            return self._connection.execute(query, held).fetchall()


def _why_absent(path: Path) -> str:
    run = read_run(path.parent)
    if run is not None and run.last.settings.get("record_max_mib", {}).get("value") == 0:
        return "the run keeps no record (--record-max-mib 0)"
    return "the run has recorded no rollout yet, or this is not its folder"


def unusable(path: Path, what: str, error: Exception) -> RecordError:
    """Return the error for a file that cannot be used, with what to do about it."""
    damaged = not isinstance(error, sqlite3.OperationalError)
    fix = (
        f" The file is damaged: put a copy of it back, or move {path.name}* away; then the run resumes from "
        "its checkpoints, and generates again what came after them."
    )
    return RecordError(f"{path} cannot be {what}: {error}.{fix if damaged else ''}")


def _connect(uri: str, path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, check_same_thread=False)
    except sqlite3.Error as error:
        raise RecordError(f"{path} cannot be opened: {error}.") from error


def _is_new(connection: sqlite3.Connection) -> bool:
    """Return whether there are no tables, or empty ones, which a killed run of an older slime may leave."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return not tables or ("meta" in tables and not connection.execute("SELECT 1 FROM meta").fetchone())


def _check_schema(connection: sqlite3.Connection, path: Path) -> str:
    """Return the number of the file's schema. RecordError: this version of slime cannot read it."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        raise EmptyRecord(
            f"{path} is empty: its content is in {path.name}-wal, which is not in the same folder."
        )
    if "meta" not in tables:
        raise RecordError(f"{path} is not the record of a run.")
    (found,) = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() or ("missing",)
    if found != str(SCHEMA_NUMBER) and found not in _OLDER:
        raise RecordError(
            f"{path} has schema {found}, this version of slime reads {SCHEMA_NUMBER}: use the version that "
            "wrote it."
        )
    return str(found)
