"""A packed sample has the values of the sample it was, however it is read, copied or sent."""

import copy
import math
import pickle

import numpy as np
import pytest

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
