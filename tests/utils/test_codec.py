"""The codec gives values back exactly, names what it does not store, and refuses damaged bytes."""

import contextlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.codec import CodecError, ForeignValue, TensorRows, decode, encode, with_rows
from slime.utils.types import Sample

atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    atoms | st.lists(st.integers(-(2**70), 2**70)) | st.lists(st.floats()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@given(values)
@settings(deadline=None, max_examples=200)
def test_a_value_comes_back_as_it_was(value):
    data = encode(value)
    assert repr(decode(data)) == repr(value), "with types, order, and the bits of floats"
    assert encode(decode(data)) == data


@pytest.mark.parametrize(
    "value",
    [
        {1, "a", (2, 3)},
        {(1, "x"): {None: 1, 2.5: [()]}},
        "half \ud800 of a pair",
        10**9000,
        [math.inf, -math.inf],
        {"": b"\x00\xff"},
    ],
    ids=range(6),
)
def test_odd_values_come_back(value):
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_equal_sets_give_equal_bytes():
    assert encode({f"name {n}" for n in range(50)}) == encode({f"name {n}" for n in reversed(range(50))})


def test_what_is_not_a_number_stays_so():
    assert math.isnan(decode(encode({"x": math.nan}))["x"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([[1, -70_000]], dtype=torch.int32),
        torch.tensor([0.1, -0.0, math.inf]),
        torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16),
        torch.tensor([1.5, 2.5]).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.zeros(1000, 100)[:, 0],
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_comes_back_with_its_type_and_shape_in_memory_of_its_own(tensor):
    data = encode({"x": [tensor, tensor]})
    assert len(data) < 2 * tensor.numel() * tensor.itemsize + 200, "without the memory around a view"
    first, second = decode(data)["x"]
    assert first.dtype == tensor.dtype and first.shape == tensor.shape
    assert first.tolist() == tensor.tolist() if first.itemsize > 1 else torch.equal(first, tensor)
    first.zero_()
    assert torch.equal(second, tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_the_rows_of_a_batch_are_one_buffer_and_come_back_one_by_one(dtype):
    rows = [torch.arange(length).to(dtype) for length in (3, 0, 70, 1, 5)]
    batch = {"rows": rows, "mixed": [*rows, torch.zeros(2, 2)], "one": rows[:1], "names": ["a", "b"], "n": 3}
    found = decode(encode(with_rows(batch)))
    assert type(with_rows(batch)["rows"]) is TensorRows and type(with_rows(batch)["mixed"]) is list
    assert found["names"] == ["a", "b"] and found["n"] == 3 and list(found) == list(batch)
    for name in ("rows", "mixed", "one"):
        assert type(found[name]) is list and len(found[name]) == len(batch[name])
        assert all(map(torch.equal, found[name], batch[name])) and found[name][0].dtype == dtype
    found["rows"][0].zero_()
    assert torch.equal(found["rows"][2], rows[2])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="u2").reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.array([1.5]),
        np.zeros((0, 2)),
        np.array(["ab", "c"]),
        np.array(["2026-01-01"], "M8[s]"),
        np.array(3),
    ],
    ids=lambda array: array.dtype.str,
)
def test_an_array_comes_back_with_its_type_and_may_be_changed(array):
    found = decode(encode([array]))[0]
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    assert found.flags.writeable


def test_scalars_of_numpy_stay_scalars_of_numpy():
    given = [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("text")]
    found = decode(encode(given))
    assert found == given and list(map(type, found)) == list(map(type, given))


def test_a_sample_comes_back():
    sample = Sample(tokens=[5, 6, 7], response_length=1, metadata={"a": (1, {2: 3})}, loss_mask=[1])
    sample.version_spans = [("run:1", 0, 1)]
    assert Sample.from_dict(decode(encode(sample.to_dict()))) == sample


class Thing:
    pass


def holding_itself():
    value = []
    value.append((value,))
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"metadata": [1, Thing()]}, r"^a Thing at \['metadata'\]\[1\]$"),
        (Thing, r"^a type at the top$"),
        ({Thing(): 1}, r"^a Thing at \[key "),
        ({"x": ({Thing()},)}, r"^a Thing at \['x'\]\[0\]\[0\]$"),
        ({"x": np.array([None])}, r"^an array of object at \['x'\]$"),
        ({"x": torch.ones(2).to_sparse()}, r"^a Tensor at \['x'\]$"),
        (holding_itself(), "contains itself or is nested too deeply"),
    ],
    ids=range(7),
)
def test_what_is_not_stored_is_named_with_its_place(value, name):
    with pytest.raises(ForeignValue, match=name):
        encode(value)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_a_value_or_one_named_error(data):
    with contextlib.suppress(CodecError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # a list of four billion entries
        b"\xc6\xff\xff\xff\xff",  # four gigabytes
        b"\x91" * 100_000,  # lists in lists
        b"\xdf\xff\xff\xff\xff\x01\x01",
        b"\xc7\x05\x03Tensor"[:8],
        encode(torch.ones(2)).replace(b"2\n", b"9\n"),
        encode(np.ones(2)).replace(b"<f8", b"|O8"),
        encode([]) + b"\x00",
        b"\x81\x90\x01",  # a list as the key of a map
    ],
    ids=range(10),
)
def test_hostile_bytes_are_refused(data):
    with pytest.raises(CodecError, match="these bytes are damaged, or not written by slime"):
        decode(data)


def test_a_value_that_ends_early_is_refused():
    data = encode({"tokens": list(range(100)), "text": "abc", "t": torch.ones(3), "s": ({1},)})
    for end in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:end])


def test_torch_is_loaded_only_for_tensors():
    code = (
        "import sys; from slime.utils.codec import decode, encode; decode(encode({'a': (1, [2.5])}));"
        "assert 'torch' not in sys.modules; decode(bytes.fromhex(sys.argv[1])); assert 'torch' in sys.modules"
    )
    command = [sys.executable, "-c", code, encode([torch.ones(2)]).hex()]
    subprocess.run(command, check=True, timeout=300)
