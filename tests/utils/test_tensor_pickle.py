"""Tensors come back from a pickle as they went in, also those that numpy does not know."""

import pickle
import warnings

import pytest
import torch

from slime.utils.files.tensor_pickle import dumps, pack_rows, unpack_rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16])
def test_tensors_come_back_equal_and_writable(dtype):
    batch = {
        "x": [torch.arange(6).reshape(2, 3).to(dtype), torch.zeros(0, dtype=dtype)],
        "n": [1, None, "text"],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(dumps(batch))
    assert again["n"] == batch["n"]
    for old, new in zip(batch["x"], again["x"], strict=True):
        assert new.dtype == dtype and torch.equal(old, new)
    again["x"][0].zero_()


def test_a_view_is_written_without_the_rest_of_its_memory():
    column = torch.zeros(100_000).view(1000, 100)[:, 0]
    assert len(dumps(column)) < 10_000
    assert torch.equal(pickle.loads(dumps(column)), column)


def test_parameters_stay_parameters():
    weight = torch.nn.Parameter(torch.ones(2))
    again = pickle.loads(dumps(weight))
    assert isinstance(again, torch.nn.Parameter) and again.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_rows_of_a_batch_travel_as_one_tensor_and_come_back_one_by_one(dtype):
    rows = [torch.arange(length).to(dtype) for length in (3, 0, 2)]
    batch = {"rows": rows, "mixed": [rows[0], torch.zeros(2, 2)], "names": ["a", "b"], "one": rows[:1]}
    again = unpack_rows(pickle.loads(dumps(pack_rows(batch))))
    assert again["names"] == batch["names"] and again.keys() == batch.keys()
    for key in ("rows", "mixed", "one"):
        assert len(again[key]) == len(batch[key]) and all(map(torch.equal, again[key], batch[key]))
    assert [row.dtype for row in again["rows"]] == [dtype] * 3
