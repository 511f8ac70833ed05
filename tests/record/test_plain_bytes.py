"""Plain values come back from bytes exactly; anything else is named and refused."""

import contextlib
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.record.plain_bytes import ForeignValue, dumps, loads
from slime.utils.types import Sample

atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans()
values = st.recursive(
    atoms | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4) | st.lists(st.floats(), min_size=4),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@given(values)
@settings(deadline=None, max_examples=150)
def test_a_value_comes_back_as_it_was(value):
    assert repr(loads(dumps(value))) == repr(value), "with types, order, and the bits of floats"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([[1, -70_000]], dtype=torch.int32),
        torch.tensor([0.1, -0.0, math.inf]),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(7),
    ],
    ids=str,
)
def test_a_tensor_comes_back_with_its_type_and_shape(tensor):
    found = loads(dumps({"x": tensor}))["x"]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_the_rows_of_a_batch_come_back_one_by_one(dtype):
    rows = [torch.arange(length).to(dtype) for length in (3, 0, 70, 1, 5)]
    packed = dumps({"rows": rows, "few": rows[:2], "mixed": [*rows, torch.zeros(2, 2)]})
    found = loads(packed)
    assert [row.dtype for row in found["rows"]] == [dtype] * 5
    for name, expected in (("rows", rows), ("few", rows[:2]), ("mixed", [*rows, torch.zeros(2, 2)])):
        assert len(found[name]) == len(expected) and all(map(torch.equal, found[name], expected))
    found["rows"][0][:] = 0  # a row of its own, no part of another's memory
    assert torch.equal(found["rows"][2], rows[2])


@pytest.mark.parametrize("array", [np.arange(6, dtype="u2").reshape(2, 3), np.array([1.5]), np.zeros((0, 2))])
def test_an_array_comes_back(array):
    found = loads(dumps([array, array.dtype.type(3)]))
    assert found[0].dtype == array.dtype and np.array_equal(found[0], array) and found[1] == 3


def test_a_sample_takes_a_few_bytes_per_token():
    sample = Sample(tokens=list(range(1000, 9000)), rollout_log_probs=[-0.5] * 8000, loss_mask=[1] * 8000)
    packed = dumps(sample.to_dict())
    short = Sample(tokens=[5, 6, 7], response_length=1, metadata={"a": (1, {2: 3})}, loss_mask=[1])
    assert Sample.from_dict(loads(dumps(short.to_dict()))) == short
    assert len(packed) < 8000 * 7 + 2000
    assert Sample.from_dict(loads(packed)) == sample


def test_what_is_not_plain_is_named():
    with pytest.raises(ForeignValue, match=r"a object at \['metadata'\]\[1\]"):
        dumps({"metadata": [1, object()]})


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=150)
def test_bytes_that_are_no_value_are_one_clear_error(data):
    with contextlib.suppress(ValueError):
        loads(data)


def test_a_value_that_ends_early_is_refused():
    data = dumps({"tokens": list(range(100)), "text": "abc"})
    for end in range(len(data)):
        with pytest.raises(ValueError):
            loads(data[:end])


@pytest.mark.parametrize(
    "groups",
    [
        [[{"a": 1, "b": [2.5, 3.5]}], [{"a": 2, "b": []}, {"a": True, "b": [1.0]}]],
        [[{"a": 1}], []],
        [[{"a": 1}], [{"b": 1}]],
        [[{"a": 1}], [[{"a": 1}]]],
        [[{"a": 1}], 3],
        [[], [{"a": 1}]],
    ],
)
def test_groups_of_samples_come_back_in_their_groups(groups):
    assert repr(loads(dumps(groups))) == repr(groups)


def test_groups_of_another_number_than_their_samples_are_refused():
    data = dumps([[{"a": 1}, {"a": 2}], [{"a": 3}]])
    lengths = struct.pack("<2I", 2, 1)
    assert data.count(lengths) == 1
    for wrong in ((1, 1), (2, 2)):
        with pytest.raises(ValueError, match="groups of another length"):
            loads(data.replace(lengths, struct.pack("<2I", *wrong)))
