"""The tables of `record.db`, and how the file is opened by its one writer and by any number of readers.

    rollouts   one row for each rollout and each evaluation: when, of which weights, how many, mean reward
    groups     one row per prompt group: the prompt, its label, what became of the group and why
    samples    one row per answer: text, reward and its parts; where they are many, also tokens,
               log-probs, loss mask and weight versions
    numbers_of_answers
               those of all answers of several groups, where they are few (`numbers`: of schema 3, of a group)
    advantages what the trainer made of an answer, where that is one number for each token of the response
    group_advantages
               the same, where it is one number for each answer
    pieces     the text of every token id that occurred
    spans      what took how long in which lane: the loop, engines, rewards, trainer ranks, pushes
    actions    what somebody asked of the run, and what it answered at a boundary of steps
    ledger     one row per event of a group, a sample or a step, in the order they happened; only added to
    ledger_finished, ledger_rollouts
               what was generated and is not part of a checkpoint yet, whole: a run that was killed goes on
               with it

When the file reaches its limit, the oldest rollouts lose their groups and samples; their own rows stay. What
refers to a removed row is removed by `forget_groups`: SQLite, asked to, would look for the group of each
sample as it is written.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from slime.utils.files.restricted import create_restricted
from slime.utils.files.run_file import read_run

RECORD_FILE = "record.db"
SCHEMA_NUMBER = 5
_READABLE = ("1", "2", "3", "4", "5")  # what a file of an earlier schema lacks is empty
_BUSY_S = 30.0  # how long a statement waits for another process's lock
# What reading a file raises; the last where its tables have names that are no text any more.
READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,             -- train or eval
    rollout_id INTEGER NOT NULL,
    time REAL NOT NULL,             -- seconds since 1970, when it ended
    version TEXT,                   -- weights that the engines held when it began
    num_groups INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    mean_reward REAL,
    pruned INTEGER NOT NULL DEFAULT 0,
    UNIQUE (kind, rollout_id)
);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    dataset TEXT,                   -- of an evaluation
    group_index INTEGER,
    prompt TEXT NOT NULL,
    prompt_hash INTEGER NOT NULL,
    label TEXT,
    outcome TEXT NOT NULL,          -- trained, filtered, failed or evaluated
    reason TEXT
);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY,
    group_row INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    sample_index INTEGER,
    execution INTEGER,              -- siblings of one fan-out share it
    status TEXT NOT NULL,
    reward REAL,
    reward_parts TEXT,              -- JSON, where the reward is more than a number
    failure TEXT,                   -- why there is no reward
    response TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,    -- of the response
    tokens BLOB,                    -- prompt and response; NULL: in a piece, as the next three
    log_probs BLOB,                 -- one per response token
    loss_mask BLOB,                 -- run lengths, beginning with zeros; NULL: all ones
    versions TEXT                   -- JSON: [version, start, end] in the response
);
CREATE INDEX groups_of_rollout ON groups (rollout);
CREATE INDEX groups_of_prompt ON groups (prompt_hash);
CREATE INDEX samples_of_group ON samples (group_row);
"""
# Run on new files behind the tables above, and on files of an earlier schema when a run goes on with one.
_ADDED_IN_2 = """
ALTER TABLE groups ADD COLUMN spread REAL;  -- highest minus lowest reward; NULL: fewer than two
CREATE TABLE advantages (
    sample INTEGER PRIMARY KEY REFERENCES samples ON DELETE CASCADE,
    value REAL NOT NULL,            -- mean over the tokens that are trained on
    tokens BLOB                     -- float32, one per response token; NULL: all are `value`
);
CREATE TABLE pieces (token INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE spans (
    id INTEGER PRIMARY KEY,
    rollout_id INTEGER NOT NULL,    -- the step it belongs to
    lane TEXT NOT NULL,             -- loop, engines, reward, trainer-0, ...
    name TEXT NOT NULL,
    start REAL NOT NULL,            -- seconds since 1970
    end REAL NOT NULL,
    about TEXT                      -- JSON
);
CREATE TABLE actions (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,             -- when it was asked for
    name TEXT NOT NULL,             -- a row of slime.catalog.actions
    value REAL,
    who TEXT NOT NULL,              -- page, command line, ...
    state TEXT NOT NULL,            -- asked, done or refused
    answered REAL,
    rollout_id INTEGER,             -- the step after which it was answered
    answer TEXT
);
CREATE INDEX spans_of_rollout ON spans (rollout_id);
"""
_ADDED_IN_3 = """
CREATE TABLE numbers (
    group_row INTEGER PRIMARY KEY REFERENCES groups ON DELETE CASCADE,
    payload BLOB NOT NULL           -- slime.record.numbers, in the order of the samples' ids
);
CREATE TABLE group_advantages (
    group_row INTEGER PRIMARY KEY REFERENCES groups ON DELETE CASCADE,
    payload BLOB NOT NULL           -- float64, in the order of the samples' ids; NaN: none
);
"""
_ADDED_IN_4 = """
CREATE TABLE numbers_of_answers (
    first_sample INTEGER PRIMARY KEY,  -- the others of the piece follow it
    payload BLOB NOT NULL           -- slime.record.numbers, in the order of the samples' ids
);
"""
_ADDED_IN_5 = """
ALTER TABLE rollouts ADD COLUMN checksum INTEGER;  -- slime.record.checksums; NULL: none was taken
"""
_ADDED = {  # to a file of this schema
    "1": _ADDED_IN_2 + _ADDED_IN_3 + _ADDED_IN_4 + _ADDED_IN_5,
    "2": _ADDED_IN_3 + _ADDED_IN_4 + _ADDED_IN_5,
    "3": _ADDED_IN_4 + _ADDED_IN_5,
    "4": _ADDED_IN_5,
}
# For the page, which shows answers in these orders: few are sorted faster than indexes of them are kept.
_ORDERS = """
CREATE INDEX IF NOT EXISTS samples_by_reward ON samples (reward);
CREATE INDEX IF NOT EXISTS samples_by_length ON samples (num_tokens);
CREATE INDEX IF NOT EXISTS groups_by_spread ON groups (spread);
"""
MANY_SAMPLES = 50_000
# Run whenever the writer opens a file.
_LEDGER = """
CREATE TABLE IF NOT EXISTS ledger (
    id INTEGER PRIMARY KEY,         -- the order of events; clocks may go backwards
    time REAL NOT NULL,
    start INTEGER NOT NULL,         -- number of the run's start that wrote it
    event TEXT NOT NULL,            -- slime.record.ledger_rows.Event
    rollout INTEGER NOT NULL,       -- that was being made, or that the event is about
    group_index INTEGER,
    sample_index INTEGER,
    attempt INTEGER,
    value TEXT                      -- reason, status, or numbers as JSON
);
CREATE TABLE IF NOT EXISTS ledger_finished (
    id INTEGER PRIMARY KEY,
    group_index INTEGER,
    settings TEXT NOT NULL,         -- digest of the settings these samples were made with
    keys TEXT NOT NULL,             -- JSON: index, attempt, tokens at the start and newest weights of each
    payload BLOB NOT NULL           -- slime.record.plain_bytes
);
CREATE INDEX IF NOT EXISTS ledger_finished_of_group ON ledger_finished (group_index);
DROP TABLE IF EXISTS ledger_samples;  -- of an earlier version: one row for each
CREATE TABLE IF NOT EXISTS ledger_rollouts (
    rollout_id INTEGER PRIMARY KEY,
    settings TEXT NOT NULL,
    payload BLOB NOT NULL
);
"""


class RecordError(ValueError):
    """The record of a run cannot be read or written, and why."""


class EmptyRecord(RecordError):
    """There is no record, or nothing is in it."""


def create_or_open(path: Path, run_id: str) -> sqlite3.Connection:
    """Open it for the one writer. A file of another run or schema is a RecordError, and is never changed."""
    refuse_foreign(path, run_id)
    _know_numpy()
    try:
        create_restricted(path)
        for kept in (path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm")):
            if kept.exists():  # of an earlier start; SQLite gives new ones the mode of the record
                create_restricted(kept)
    except OSError as error:
        raise RecordError(f"{path} cannot be opened: {error}.") from error
    connection = _connect(f"{path.resolve().as_uri()}?mode=rw", path)
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not _has_tables(connection):
            connection.executescript(f"BEGIN; {_TABLES} {_ADDED['1']} COMMIT;")
            connection.execute(
                "INSERT INTO meta VALUES ('schema', ?), ('run', ?)", (str(SCHEMA_NUMBER), run_id)
            )
            connection.commit()
        if added := _ADDED.get(_check_schema(connection, path)):
            number = f"UPDATE meta SET value = '{SCHEMA_NUMBER}' WHERE key = 'schema';"
            connection.executescript(f"BEGIN; {added} {number} COMMIT;")
        owner = _check_owner(connection, path, run_id)
        connection.executescript(f"BEGIN; {_LEDGER} COMMIT;")
        if owner != run_id:  # of a run that ended before its first rollout: nothing of it is in the way
            with connection:
                for table in ("ledger", "ledger_finished", "ledger_rollouts", "spans", "actions"):
                    connection.execute(f"DELETE FROM {table}")
                connection.execute("DELETE FROM meta WHERE key LIKE 'missed%'")
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('run', ?)", (run_id,))
    except READ_ERRORS as error:
        connection.close()
        raise unusable(path, "written", error) from error
    except RecordError:
        connection.close()
        raise
    return connection


def _know_numpy() -> None:
    """Numbers of numpy, by which users' data sources may count, are numbers: SQLite takes them for bytes."""
    for kind in np.sctypeDict.values():
        if issubclass(kind, (np.integer, np.bool_)):
            sqlite3.register_adapter(kind, int)
        elif issubclass(kind, np.floating):
            sqlite3.register_adapter(kind, float)


def index_orders(connection: sqlite3.Connection) -> None:
    """Adds the indexes that a record of many samples is sorted by."""
    for statement in _ORDERS.split(";")[:-1]:
        connection.execute(statement)


def forget_groups(connection: sqlite3.Connection, rollout: int) -> None:
    """Removes the groups of a rollout's row, with all that refers to them."""
    groups = "(SELECT id FROM groups WHERE rollout = ?)"
    samples = f"(SELECT id FROM samples WHERE group_row IN {groups})"
    for query in (
        f"DELETE FROM advantages WHERE sample IN {samples}",
        f"DELETE FROM numbers_of_answers WHERE first_sample IN {samples}",
        f"DELETE FROM samples WHERE group_row IN {groups}",
        f"DELETE FROM numbers WHERE group_row IN {groups}",
        f"DELETE FROM group_advantages WHERE group_row IN {groups}",
        "DELETE FROM groups WHERE rollout = ?",
    ):
        connection.execute(query, (rollout,))


def refuse_foreign(path: Path, run_id: str) -> None:
    """A RecordError where a file of another run or schema is in the place; nothing of it is changed.

    To open one for writing changes counters in its first page.
    """
    _refuse_no_file(path)
    if not path.exists() or not path.stat().st_size:
        return
    connection = _connect(f"{path.resolve().as_uri()}?mode=ro", path)
    try:
        if not _has_tables(connection):  # they were lost with the write-ahead log: it is begun anew
            return
        _check_schema(connection, path)
        _check_owner(connection, path, run_id)
    except sqlite3.OperationalError:  # told by whoever opens it for writing
        pass
    except READ_ERRORS as error:
        raise unusable(path, "written", error) from error
    finally:
        connection.close()


def _check_owner(connection: sqlite3.Connection, path: Path, run_id: str) -> str:
    """The run whose record it is; a RecordError where that is another and has samples in it."""
    (owner,) = connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone() or ("unknown",)
    if owner != run_id and connection.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone():
        raise RecordError(
            f"{path} is the record of run {owner}, this is {f'run {run_id}' if run_id else 'a new run'}; use "
            "another folder, or move the file away."
        )
    return str(owner)


def _refuse_no_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise RecordError(f"{path} is no file: the record of the run has its place there; move it away.")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open it for a reader, while the run goes on or after it; its folder need not be writable."""
    _refuse_no_file(path)
    if not path.exists():
        raise EmptyRecord(f"{path} does not exist: {_why_absent(path)}.")
    uri = path.resolve().as_uri()
    connection = _connect(f"{uri}?mode=ro", path)
    try:
        try:
            _check_schema(connection, path)
        except sqlite3.OperationalError:  # a read-only folder has no place for the write-ahead log's index
            connection.close()
            connection = _connect(f"{uri}?mode=ro&immutable=1", path)
            _check_schema(connection, path)
    except READ_ERRORS as error:
        connection.close()
        raise unusable(path, "read", error) from error
    except RecordError:
        connection.close()
        raise
    return connection


def _why_absent(path: Path) -> str:
    run = read_run(path.parent)
    if run is not None and run.last.settings.get("record_max_mib", {}).get("value") == 0:
        return "the run keeps no record (--record-max-mib 0)"
    if path.is_symlink():
        return f"it is a link to {path.readlink()}, which is not there"
    return "the run has recorded no rollout yet, or this is not its folder"


def unusable(path: Path, what: str, error: Exception) -> RecordError:
    """Also says what can be done about a file that is damaged."""
    damaged = not isinstance(error, sqlite3.OperationalError)
    fix = (
        f" The file is damaged: put a copy of it back, or move {path.name}* away; then the run goes on from "
        "its checkpoints, and makes again what it generated since."
    )
    return RecordError(f"{path} cannot be {what}: {error}.{fix if damaged else ''}")


def open_for_asking(path: Path) -> sqlite3.Connection:
    """Open it for whoever asks something of a run: one short transaction beside its writer."""
    if not path.is_file():
        raise RecordError(f"{path} does not exist: the run has no record to write to.")
    connection = _connect(f"{path.resolve().as_uri()}?mode=rw", path)
    try:
        if _check_schema(connection, path) == "1":
            raise RecordError(f"{path} was written by an older version of slime, which takes no actions.")
    except (*READ_ERRORS, RecordError) as error:
        connection.close()
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} cannot be read: {error}.") from error
    return connection


def _connect(uri: str, path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, check_same_thread=False)
    except sqlite3.Error as error:
        raise RecordError(f"{path} cannot be opened: {error}.") from error


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _check_schema(connection: sqlite3.Connection, path: Path) -> str:
    """The number of the file's schema."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        raise EmptyRecord(
            f"{path} holds nothing: what was written is in {path.name}-wal, which is not beside it."
        )
    if "meta" not in tables:
        raise RecordError(f"{path} is no record of a run.")
    (found,) = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() or ("missing",)
    if found not in _READABLE:
        raise RecordError(
            f"{path} has schema {found}, this version of slime reads {SCHEMA_NUMBER}: use the version that "
            "wrote it."
        )
    return str(found)
