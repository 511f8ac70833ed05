"""Bytes of a record that were changed: one error that names the file and what to do; a run goes on."""

import contextlib
import logging
import random
import sqlite3

import pytest
from ledger_world import World, finish, group_of

from slime.cli.inspect import ledger as ledger_command
from slime.cli.inspect import samples as samples_command
from slime.record import LedgerReader, Record, RecordError, Select, group_entries, schema
from slime.record.audit import audit
from slime.record.schema import create_or_open, refuse_foreign
from slime.utils.files.run_file import open_run_file
from slime.utils.types import Sample


def made_run(folder):
    world = World(folder)
    world.start()
    world.step(0, [group_of(0), group_of(1)], commit=True)
    world.step(1, [group_of(2), group_of(3)])
    world.stop()
    return world


def ask_all(path):
    audit(path, finished=True)
    with Record(path) as record:
        for answer in record.samples(Select(limit=100)):
            record.tokens(answer.row)
    with LedgerReader(path) as reader:
        reader.finished_entries("s")


def test_whatever_byte_is_changed_readers_answer_or_name_the_file(tmp_path):
    path = made_run(tmp_path).path
    whole, draw = path.read_bytes(), random.Random(3)
    for _ in range(60):
        data = bytearray(whole)
        at = draw.randrange(len(data))
        data[at : at + 40] = draw.randbytes(len(data[at : at + 40]))
        path.write_bytes(data)
        try:
            ask_all(path)
        except RecordError as error:
            assert str(path) in str(error)


def damage_names_of_tables(path):
    """SQLite's complaint about them quotes bytes that are no text."""
    path.write_bytes(path.read_bytes().replace(b"outcome TEXT NOT NULL,", b'outcome TEXT NO\xb4 "\xc1\xb4L,'))


def test_names_that_are_no_text_are_told_as_damage(tmp_path, capsys):
    path = made_run(tmp_path).path
    damage_names_of_tables(path)
    with pytest.raises(RecordError, match=r"record\.db cannot be read.*put a copy of it back"):
        audit(path, finished=True)
    (tmp_path / "run.json").write_text("{}")
    assert ledger_command.main(["audit", str(tmp_path)]) == 2
    assert samples_command.main([str(tmp_path)]) == 2


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ledger SET value = '[4, ' WHERE event = 'kept'",
        "UPDATE ledger SET value = 'x' WHERE event = 'resumed'",
        "UPDATE samples SET reward_parts = '{'",
        "UPDATE samples SET reward = 'high'",
        "UPDATE samples SET num_tokens = 'many'",
    ],
)
def test_a_row_that_nobody_wrote_so_is_told_with_the_file(tmp_path, change):
    path = made_run(tmp_path).path
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    with pytest.raises(RecordError, match=r"record\.db cannot be read.*damaged"):
        audit(path, finished=True)


def test_a_finished_sample_that_is_damaged_is_generated_again(tmp_path, caplog):
    world = World(tmp_path)
    ledger = world.start()
    ledger.begin(0, "run:1")
    for sample in group_of(0):
        ledger.finished(sample, finish(sample))
    world.stop()
    with sqlite3.connect(world.path) as connection:
        connection.execute("UPDATE ledger_finished SET payload = substr(payload, 1, 20) WHERE id = 1")
    ledger = world.start()
    ledger.begin(0, "run:1")
    with caplog.at_level(logging.WARNING):
        assert ledger.recall(group_of(0)[0]) is None
    assert "sample 0 (group 0) is damaged in the ledger and will be generated again" in caplog.text
    assert isinstance(ledger.recall(group_of(0)[1]), Sample)
    world.stop()


# ---- what the audit finds ----------------------------------------------------------------------------------


def change(path, *statements):
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)


_FORGET_GROUP_3 = (
    "DELETE FROM ledger WHERE group_index = 3",
    "DELETE FROM samples WHERE group_row IN (SELECT id FROM groups WHERE group_index = 3)",
    "DELETE FROM groups WHERE group_index = 3",
)
_COPIED = "group_row, sample_index, execution, status, reward, response, num_tokens"


@pytest.mark.parametrize(
    ("statements", "told"),
    [
        (["DELETE FROM samples WHERE id = 3"], "step 0: samples [2] are in its batch or in the ledger"),
        ([f"INSERT INTO samples ({_COPIED}) SELECT {_COPIED} FROM samples WHERE id = 3"], "train 0 differ"),
        (_FORGET_GROUP_3, "the samples of train 1 differ from what was written"),
        (["DELETE FROM ledger WHERE rollout = 1"], "samples of rollout 1 are in the record, but the ledger"),
        (["UPDATE samples SET reward = 0.5 WHERE id = 2"], "the samples of train 0 differ from what"),
        (["UPDATE samples SET response = 'else' WHERE id = 2"], "the samples of train 0 differ from"),
        (
            ["UPDATE samples SET numbers = NULL WHERE id = 2"],
            "the samples of train 0 differ from what was written",
        ),
        (["UPDATE ledger SET rollout = 1 << 62 WHERE event = 'committed'"], "misses step 1"),
        (
            ["UPDATE ledger SET group_index = 1 << 62 WHERE event = 'issued' AND group_index = 3"],
            "groups [3, 4, 5",
        ),
    ],
)
def test_what_was_changed_behind_the_runs_back_is_found(tmp_path, statements, told):
    path = made_run(tmp_path).path
    assert audit(path, finished=False).violations == []
    change(path, *statements)
    violations = audit(path, finished=False).violations
    assert any(told in violation for violation in violations), violations


def test_a_flipped_bit_of_a_log_prob_or_a_token_is_found(tmp_path):
    path = made_run(tmp_path).path
    assert audit(path, finished=False).violations == []
    whole, places = path.read_bytes(), [b"\x94\x93\x05\x06\x07", b"\x00\x00\x80\xbe"]  # tokens, -0.25
    for place in places:
        at = whole.rindex(place) + 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        [violation] = audit(path, finished=False).violations
        assert "differ from what was written" in violation


def test_rewards_that_sqlite_keeps_otherwise_are_those_that_were_written(tmp_path):
    world = World(tmp_path)
    world.start()
    rewards = [float("nan"), -0.0, float("inf"), None, 3, {"score": 1.0}]
    made = [[finish(sample, reward=reward) for sample in group_of(0)] for reward in rewards]
    world.writer.add("eval", 0, group_entries(made, "evaluated"))
    world.stop()
    with Record(world.path) as record:
        assert record.changed() == []


def test_the_record_of_another_run_is_told_from_that_of_the_folder(tmp_path, capsys):
    run = open_run_file(tmp_path, {}, None, None, None)
    made_run(tmp_path)
    assert ledger_command.main(["audit", str(tmp_path)]) == 2
    assert f"is the record of run run, but its folder belongs to run {run.id}" in capsys.readouterr().err


def test_a_checkpoint_that_the_ledger_knows_nothing_of_is_told(tmp_path):
    """As where the write-ahead log was cut, or left behind when the folder was copied."""
    world = made_run(tmp_path)
    assert audit(world.path, finished=False, saved=[0, 1]).violations == []
    [violation] = audit(world.path, finished=False, saved=[0, 1, 2]).violations
    assert "there are checkpoints after steps [2]" in violation and "record.db-wal" in violation
    world.start(committed=5, last_made=5)  # of which nothing else is known: it went on behind them
    world.stop()
    assert not any("checkpoints after" in v for v in audit(world.path, finished=False, saved=[4]).violations)


def test_a_record_whose_tables_went_with_the_write_ahead_log_is_begun_anew(tmp_path):
    """As after a power failure before SQLite has moved anything from the log into the file."""
    path = tmp_path / "record.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size
    with pytest.raises(RecordError, match=r"is empty: its content is in record\.db-wal"):
        audit(path, finished=False)
    refuse_foreign(path, "run")
    assert made_run(tmp_path).audit(finished=False).violations == []


def test_a_run_that_is_killed_while_it_creates_its_record_leaves_one_that_the_next_start_creates(
    tmp_path, monkeypatch
):
    path, create = tmp_path / "record.db", schema.create_tables

    def die_after(connection):
        create(connection)
        connection.interrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "create_tables", die_after)
    with pytest.raises(KeyboardInterrupt):
        create_or_open(path, "run")
    with contextlib.closing(sqlite3.connect(path)) as left:
        assert not left.execute("SELECT name FROM sqlite_master").fetchall()
        create(left)  # what an older version of slime left
    monkeypatch.undo()
    refuse_foreign(path, "run")
    create_or_open(path, "run").close()
    with Record(path) as record:
        assert record.samples(Select(limit=1)) == []
