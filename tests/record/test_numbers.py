"""The numbers of small groups in one piece, and those of large answers each by itself."""

import contextlib
import json
import sqlite3
import struct

import pytest

from slime.record import RecordError, RecordWriter, group_entries, numbers, open_record, schema
from slime.record.numbers import Columns, pack_answers, unpack_answers
from slime.record.reader import Select
from slime.utils.types import Sample

MIB = 1 << 20


def make_sample(index, tokens, log_probs=(-0.5, -0.25), mask=(1, 1)):
    return Sample(
        group_index=0,
        index=index,
        prompt="2+2=",
        tokens=list(tokens),
        response="4!",
        response_length=2,
        reward=1.0,
        rollout_log_probs=None if log_probs is None else list(log_probs),
        loss_mask=None if mask is None else list(mask),
        version_spans=[("run:1", 0, 2)],
        status=Sample.Status.COMPLETED,
    )


def packed(samples):
    return pack_answers(Columns(*[[getattr(s, name) for s in samples] for name in Columns._fields]))


def asked(path, query):
    with contextlib.closing(sqlite3.connect(path / "record.db")) as connection, connection:
        return connection.execute(query).fetchall()


def written(path, *groups, rollout_id=0):
    writer = RecordWriter(path / "record.db", "run-1", 64 * MIB)
    writer.add("train", rollout_id, group_entries(groups, "trained"))
    writer.close()
    return read(path)


def read(path):
    with open_record(path) as record:
        return [record.tokens(answer.row) for answer in record.answers(Select())]


@pytest.mark.parametrize("length", [3, 5000])
def test_numbers_are_read_as_they_were_written(tmp_path, length):
    samples = [
        make_sample(0, range(length)),
        make_sample(1, [70_000, 1, 2], mask=(0, 1)),
        make_sample(2, [], log_probs=None, mask=None),
    ]
    for sample, tokens in zip(samples, written(tmp_path, samples), strict=True):
        assert (tokens.ids, tokens.log_probs) == (sample.tokens, sample.rollout_log_probs)
        assert (tokens.loss_mask, tokens.versions) == (sample.loss_mask, sample.version_spans)


def grouped(count, size=2, tokens=(5, 6, 7)):
    """Groups of answers that all differ."""
    groups = [[make_sample(size * g + i, [*tokens, 100 * g + i]) for i in range(size)] for g in range(count)]
    for number, sample in enumerate(s for group in groups for s in group):
        sample.group_index = sample.index // size
        sample.version_spans = [(f"run:{number % 3}", 0, 2)] if number % 4 else []
    return groups


def test_groups_that_are_small_share_a_piece(tmp_path):
    groups = grouped(5)
    found = written(tmp_path, *groups)
    samples = [sample for group in groups for sample in group]
    assert [(t.ids, t.versions) for t in found] == [(s.tokens, s.version_spans) for s in samples]
    assert asked(tmp_path, "SELECT first_sample FROM numbers_of_answers") == [(1,)]


def test_a_piece_holds_so_many_tokens_and_never_a_part_of_a_group(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "_PIECE_TOKENS", 20)
    groups = grouped(5)  # of eight tokens
    found = written(tmp_path, *groups)
    assert [t.ids for t in found] == [s.tokens for group in groups for s in group]
    assert asked(tmp_path, "SELECT first_sample FROM numbers_of_answers") == [(1,), (5,), (9,)]


def test_answers_by_themselves_behind_a_piece_are_not_looked_for_in_it(tmp_path):
    small, large = grouped(2), [[make_sample(0, range(5000))]]
    written(tmp_path, *small)
    found = {tuple(t.ids) for t in written(tmp_path, *large, rollout_id=1)}
    assert found == {tuple(s.tokens) for group in small + large for s in group}


def test_a_rollout_that_is_made_again_takes_the_place_of_the_pieces_too(tmp_path):
    written(tmp_path, *grouped(3))
    groups = grouped(2, tokens=(8, 9))
    assert [t.ids for t in written(tmp_path, *groups)] == [s.tokens for group in groups for s in group]
    assert len(asked(tmp_path, "SELECT 1 FROM numbers_of_answers")) == 1


def as_schema_3(path, groups):
    """Turns a record of one rollout into what the version before left: a piece for each group."""
    with contextlib.closing(sqlite3.connect(path / "record.db")) as connection, connection:
        connection.execute("DROP TABLE numbers_of_answers")
        connection.execute("ALTER TABLE rollouts DROP COLUMN checksum")
        connection.execute("UPDATE meta SET value = '3' WHERE key = 'schema'")
        for index, group in enumerate(groups):
            header = {
                "ids": ["H", [len(s.tokens) for s in group]],
                "log_probs": [len(s.rollout_log_probs) for s in group],
                "masks": [1] * len(group),
                "versions": [json.dumps(s.version_spans) if s.version_spans else None for s in group],
            }
            text = json.dumps(header).encode()
            ids = [token for s in group for token in s.tokens]
            floats = [value for s in group for value in s.rollout_log_probs]
            payload = struct.pack("<I", len(text)) + text + struct.pack(f"<{len(ids)}H", *ids)
            payload += struct.pack(f"<{len(floats)}f", *floats)
            row = "(SELECT id FROM groups WHERE group_index = ?)"
            connection.execute(f"INSERT INTO numbers VALUES ({row}, ?)", (index, payload))


def test_pieces_of_the_schema_before_are_read_also_by_a_run_that_goes_on(tmp_path):
    groups = grouped(3)
    samples = [sample for group in groups for sample in group]
    expected = [(s.tokens, s.rollout_log_probs, s.loss_mask, s.version_spans) for s in samples]
    written(tmp_path, *groups)
    as_schema_3(tmp_path, groups)
    assert [(t.ids, t.log_probs, t.loss_mask, t.versions) for t in read(tmp_path)] == expected
    found = written(tmp_path, *grouped(2, tokens=(8, 9)), rollout_id=1)  # the newest come first
    assert [t.ids for t in found[:4]] == [s.tokens for group in grouped(2, tokens=(8, 9)) for s in group]
    assert [(t.ids, t.log_probs, t.loss_mask, t.versions) for t in found[4:]] == expected
    assert asked(tmp_path, "SELECT value FROM meta WHERE key = 'schema'") == [(str(schema.SCHEMA_NUMBER),)]


@pytest.mark.parametrize("largest", [255, 256, 65_535, 70_000])
@pytest.mark.parametrize("spans", [[["run:1", 0, 1], ["run:2", 1, 2]], [["run:1", 0, 2]], []])
def test_spans_that_are_lists_and_tokens_of_any_vocabulary_are_packed(tmp_path, largest, spans):
    odd = make_sample(0, [largest, 5, 6])
    odd.version_spans = spans
    [found] = written(tmp_path, [odd])
    assert (found.ids, found.versions) == (odd.tokens, [tuple(span) for span in spans])


def test_a_damaged_piece_is_an_error_and_no_crash(tmp_path):
    data = packed([make_sample(0, [5, 6, 7]), make_sample(1, [5, 8])])
    for cut in range(len(data)):
        with pytest.raises(ValueError, match="not the numbers of answers"):
            unpack_answers(data[:cut])
    with pytest.raises(ValueError, match="not the numbers of answers"):
        unpack_answers(data + b"x")


def test_a_record_with_a_damaged_piece_says_so(tmp_path):
    written(tmp_path, [make_sample(0, [5, 6, 7])])
    asked(tmp_path, "UPDATE numbers_of_answers SET payload = x'0102'")
    with open_record(tmp_path) as record, pytest.raises(RecordError, match="cannot be read"):
        record.tokens(record.answers(Select())[0].row)


def test_what_is_no_list_of_numbers_is_written_by_itself():
    assert packed([make_sample(0, ["a"])]) is None
