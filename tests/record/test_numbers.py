"""Token ids, log-probs, masks and versions of samples are read as they were written."""

import contextlib
import sqlite3

import numpy as np
import pytest
import torch

from slime.record import RecordError, RecordWriter, group_entries, open_record
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
        return [record.tokens(answer.row) for answer in record.samples(Select())]


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


def test_a_rollout_that_is_made_again_replaces_the_first(tmp_path):
    written(tmp_path, *grouped(3))
    groups = grouped(2, tokens=(8, 9))
    assert [t.ids for t in written(tmp_path, *groups)] == [s.tokens for group in groups for s in group]


@pytest.mark.parametrize("largest", [255, 256, 65_535, 70_000])
@pytest.mark.parametrize("spans", [[["run:1", 0, 1], ["run:2", 1, 2]], [["run:1", 0, 2]], []])
def test_spans_that_are_lists_and_tokens_of_any_vocabulary_are_packed(tmp_path, largest, spans):
    odd = make_sample(0, [largest, 5, 6])
    odd.version_spans = spans
    [found] = written(tmp_path, [odd])
    assert (found.ids, found.versions) == (odd.tokens, [tuple(span) for span in spans])


def test_a_record_with_a_damaged_piece_says_so(tmp_path):
    written(tmp_path, [make_sample(0, [5, 6, 7])])
    asked(tmp_path, "UPDATE samples SET numbers = x'0102'")
    with open_record(tmp_path) as record, pytest.raises(RecordError, match="cannot be read"):
        record.tokens(record.samples(Select())[0].row)


def test_arrays_and_tensors_of_a_plug_in_are_read_as_lists(tmp_path):
    odd = make_sample(0, [5, 6, 7])
    odd.tokens, odd.rollout_log_probs = np.array([5, 6, 7]), torch.tensor([-0.5, -0.25])
    odd.loss_mask = np.array([0, 1])
    [found] = written(tmp_path, [odd])
    assert (found.ids, found.log_probs, found.loss_mask) == ([5, 6, 7], [-0.5, -0.25], [0, 1])
