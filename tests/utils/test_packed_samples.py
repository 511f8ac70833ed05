"""A packed sample has the values of the sample it was, however it is read, copied or sent."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from slime.arguments import default_args
from slime.batch.convert import samples_to_batch
from slime.record import RECORD_FILE, RecordWriter, Select, group_entries, open_record
from slime.record.additions import PieceBook
from slime.rollout.prompt_groups import copy_sample, without_response
from slime.utils.packed_samples import PackedSample, pack, packed_array
from slime.utils.types import Sample


def a_sample(log_prob=-0.5):
    return Sample(
        index=3,
        tokens=[7, *range(100)],
        response_length=100,
        loss_mask=[1] * 60 + [0] * 40,
        rollout_log_probs=[log_prob] * 100,
        metadata={"a": [1]},
    )


def packed(sample):
    pack(sample)
    return pickle.loads(pickle.dumps(sample))


@pytest.mark.parametrize("log_prob", [-0.5, -0.1, math.nan, -math.inf])
def test_values_survive_to_the_last_bit(log_prob):
    sample = packed(a_sample(log_prob))
    assert isinstance(sample, PackedSample) and packed_array(sample, "tokens").dtype == np.int32
    assert packed_array(sample, "rollout_log_probs").dtype == (np.float64 if log_prob == -0.1 else np.float32)
    assert sample.effective_response_length == 60
    expected = a_sample(log_prob).to_dict()
    assert str(sorted(sample.to_dict().items())) == str(sorted(expected.items()))
    assert sample.tokens == a_sample().tokens and packed_array(sample, "tokens") is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, copy_sample])
def test_copies_are_independent(copied):
    sample = packed(a_sample())
    new = copied(sample)
    new.tokens.append(5)
    new.loss_mask = None
    assert sample.tokens == a_sample().tokens and sample.loss_mask == a_sample().loss_mask
    assert len(new.tokens) == 102 and new.loss_mask is None and new.effective_response_length == 100
    assert without_response(sample).tokens == [7] and without_response(sample).loss_mask is None


def test_what_is_short_or_odd_or_of_a_users_class_stays_as_it_is():
    class Own(Sample):
        pass

    short, own = Sample(tokens=[1, 2]), Own(tokens=list(range(100)))
    odd = Sample(tokens=[2**40] * 100, rollout_log_probs=[None] * 100, loss_mask=[True] * 100)
    for sample in (short, own, odd):
        pack(sample)
    assert type(short) is Sample and type(own) is Own
    assert odd.tokens == [2**40] * 100 and odd.rollout_log_probs == [None] * 100
    assert odd.loss_mask == [True] * 100 and odd.loss_mask[0] is True


def test_a_batch_and_the_record_read_the_arrays_and_leave_them(tmp_path):
    def samples():
        found = [a_sample(-0.5 - index) for index in range(3)]
        for index, sample in enumerate(found):
            sample.index = sample.group_index = index
            sample.reward, sample.version_spans = 1.0, [("run:2", 0, 50), ("run:3", 50, 60)]
        found[2].tokens, found[2].response_length, found[2].loss_mask = [7, 8], 1, [1]
        found[2].rollout_log_probs, found[2].version_spans = [-0.5], []
        return found

    args = default_args(advantage_estimator="reinforce_plus_plus")
    plain, arrays = samples(), [packed(sample) for sample in samples()]
    expected, batch = (samples_to_batch(args, found, engine_version="run:4") for found in (plain, arrays))
    assert batch.keys() == expected.keys()
    for key, values in batch.items():
        assert [_plain(value) for value in values] == [_plain(value) for value in expected[key]], key
    tokens = [write_and_read(tmp_path / name, found) for name, found in (("a", plain), ("b", arrays))]
    assert tokens[0] == tokens[1] and tokens[0][0].ids == a_sample().tokens
    assert all(packed_array(sample, "tokens") is not None for sample in arrays[:2])  # nobody made a list


def _plain(value):
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def write_and_read(folder, samples):
    folder.mkdir()
    writer = RecordWriter(folder / RECORD_FILE, "run", 1 << 20)
    book = PieceBook(lambda ids: [str(number) for number in ids])
    writer.add("train", 0, group_entries([[sample] for sample in samples], "trained"))
    writer.submit("texts", lambda connection: book.write(connection, samples))
    writer.close()
    with open_record(folder) as record:
        return [record.tokens(sample.row) for sample in record.samples(Select(kind="train"))]
