"""`slime ask`: actions of a run from a plain terminal, answered by the run between two steps."""

import contextlib
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE_S, eventually

from slime.catalog.actions import ACTIONS
from slime.cli.main import main, render_help
from slime.record import RECORD_FILE, RecordWriter
from slime.record.actions import ASKED, DONE, REFUSED, ask, read_actions, write_reply
from slime.record.schema import open_for_reading
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.run_file import close_run_file, open_run_file


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has a record and has not ended."""
    made = tmp_path / "run"
    made.mkdir()
    open_run_file(made, {}, None, None, None)
    RecordWriter(made / RECORD_FILE, "run", 1 << 20).close()
    return made


@pytest.fixture
def running(folder):
    lock = FolderLock(folder, "--run-dir")
    yield folder
    with contextlib.suppress(Exception):
        lock.release()


def rows(folder):
    with contextlib.closing(open_for_reading(folder / RECORD_FILE)) as connection:
        return read_actions(folder, connection)


def answering(folder, state, text):
    """Stands for the loop of a run: answers the first request."""

    def answer():
        eventually(lambda: rows(folder))
        with contextlib.closing(sqlite3.connect(folder / RECORD_FILE)) as connection, connection:
            write_reply(connection, folder, replace(rows(folder)[-1], state=state, reply=text))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["pause"], "pause", None),
        (["lr", "1e-6"], "lr", 1e-6),
        (["set", "lr", "1e-6"], "lr", 1e-6),
        (["clip-high", "0.3"], "clip_high", 0.3),
    ],
)
def test_a_request_is_answered_by_the_run(running, capsys, words, name, value):
    thread = answering(running, DONE, "done as asked")
    assert main(["ask", str(running), *words]) == 0
    thread.join(PATIENCE_S)
    [row] = rows(running)
    assert (row.name, row.value, row.who) == (name, value, "slime ask")
    assert "done: done as asked" in capsys.readouterr().out


def test_a_refusal_is_told_and_is_no_success(running, capsys):
    thread = answering(running, REFUSED, "the run keeps no checkpoints: start it with --save")
    assert main(["ask", str(running), "checkpoint"]) == 1
    thread.join(PATIENCE_S)
    assert "refused: the run keeps no checkpoints" in capsys.readouterr().out


def test_nobody_has_to_wait(running, capsys):
    assert main(["ask", str(running), "pause", "--no-wait"]) == 0
    assert [row.state for row in rows(running)] == [ASKED]


def test_a_run_that_has_ended_and_a_folder_that_is_none_are_named(folder, tmp_path, capsys):
    close_run_file(folder, None)
    assert main(["ask", str(folder), "pause"]) == 2
    assert "this run has ended (finished)" in capsys.readouterr().err
    assert main(["ask", str(tmp_path), "pause"]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    assert main(["ask", str(tmp_path / "nowhere"), "pause"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert not rows(folder)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["puase"], "is not an action; choose from checkpoint, evaluate, pause"),
        (["lr"], "--lr must be a number above 0"),
        (["lr", "nan"], "--lr must be a number above 0"),
        (["lr", "fast"], "'fast' is not a number"),
        (["pause", "3"], "it takes no value"),
        (["lr", "1", "2"], "unexpected '2'"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_asked(running, capsys, words, why):
    assert main(["ask", str(running), *words]) == 2
    assert why in capsys.readouterr().err
    assert not rows(running)


def test_a_run_without_a_record_is_explained(running, capsys):
    (running / RECORD_FILE).unlink()
    assert main(["ask", str(running), "pause"]) == 2
    assert "record" in capsys.readouterr().err


def test_without_an_action_all_of_them_are_listed_and_what_was_asked(running, capsys):
    ask(running, "lr", 1e-6, "page")
    assert main(["ask", str(running)]) == 0
    printed = capsys.readouterr().out
    assert all(action.what in printed for action in ACTIONS.values())
    assert "lr 1e-06, page: no reply yet" in printed


def test_the_command_is_in_the_help():
    assert "\n  ask " in render_help()


def test_a_folder_may_be_given_as_text(folder):
    asked = [ask(str(folder), "pause", None, "script"), ask(Path(folder), "resume", None, "script")]
    assert [row.id for row in rows(folder)] == asked
