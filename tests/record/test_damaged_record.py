"""Bytes of a record that were changed: one error that names the file and what to do; a run goes on."""

import logging
import random
import sqlite3

import pytest
from ledger_world import World, finish, group_of

from slime.cli.inspect import ledger as ledger_command
from slime.cli.inspect import samples as samples_command
from slime.record import LedgerReader, Record, RecordError, Select
from slime.record.audit import audit
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
        for answer in record.answers(Select(limit=100)):
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
    assert "sample 0 (group 0) is damaged in the ledger, and generated again" in caplog.text
    assert isinstance(ledger.recall(group_of(0)[1]), Sample)
    world.stop()


def test_keys_that_are_damaged_are_told_with_the_file(tmp_path):
    path = made_run(tmp_path).path
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO ledger_finished VALUES (99, 0, 's', '[[1', x'00')")
    with LedgerReader(path) as reader, pytest.raises(RecordError, match=r"record\.db cannot be read"):
        reader.finished_entries("s")
