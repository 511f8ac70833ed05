"""The numbers of a small group in one piece, and those of large answers each by itself."""

import pytest

from slime.record import RecordError, RecordWriter, group_entries, open_record
from slime.record.numbers import pack_group, unpack_group
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


def written(path, samples):
    writer = RecordWriter(path / "record.db", "run-1", 64 * MIB)
    writer.add("train", 0, group_entries([samples], "trained"))
    writer.close()
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


def test_a_damaged_piece_is_an_error_and_no_crash(tmp_path):
    data = pack_group([make_sample(0, [5, 6, 7]), make_sample(1, [5, 8])])
    for cut in range(len(data)):
        with pytest.raises(ValueError, match="not the numbers of a group"):
            unpack_group(data[:cut])
    with pytest.raises(ValueError, match="not the numbers of a group"):
        unpack_group(data + b"x")


def test_a_record_with_a_damaged_piece_says_so(tmp_path):
    import sqlite3

    written(tmp_path, [make_sample(0, [5, 6, 7])])
    with sqlite3.connect(tmp_path / "record.db") as connection:
        connection.execute("UPDATE numbers SET payload = x'0102'")
    connection.close()
    with open_record(tmp_path) as record, pytest.raises(RecordError, match="cannot be read"):
        record.tokens(record.answers(Select())[0].row)


def test_what_is_no_list_of_numbers_is_written_by_itself():
    assert pack_group([make_sample(0, ["a"])]) is None
