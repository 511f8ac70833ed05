"""Samples of a group come back from one piece of bytes exactly, or are refused."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.record.tables import pack_table, unpack_table

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
numbers = st.lists(st.integers(-(2**70), 2**70)) | st.lists(st.floats(allow_nan=False))
values = scalars | numbers | st.lists(scalars) | st.dictionaries(st.text(), scalars)
tables = st.lists(st.text(), unique=True, min_size=1, max_size=4).flatmap(
    lambda names: st.lists(st.fixed_dictionaries(dict.fromkeys(names, values)), min_size=1, max_size=5)
)


@given(tables)
@settings(deadline=None, max_examples=40)
def test_rows_come_back_as_they_were(rows):
    found = unpack_table(pack_table(rows))
    assert _told(found) == _told(rows), "with types, and the bits of floats"


def _told(rows):
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def test_what_rows_share_is_written_once_and_numbers_are_narrow():
    rows = [{"prompt": "12+30=" * 50, "tokens": [5, 6, 200] * 20, "x": [0.5] * 10} for _ in range(16)]
    assert len(pack_table(rows)) < 16 * (60 + 40) + 600


def test_half_of_a_surrogate_pair_comes_back():
    rows = [{"a": "x\ud800"}, {"a": "y"}]
    assert unpack_table(pack_table(rows)) == rows


@pytest.mark.parametrize(
    "odd", [[{"a": 1}, {"b": 1}], [{"a": 1}, {"a": object()}], [{"a": {1: 2}}, {"a": 3}]]
)
def test_other_names_and_what_json_does_not_hold_are_refused(odd):
    assert pack_table(odd) is None


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(deadline=None, max_examples=40)
def test_other_bytes_are_a_value_error(data, cut):
    whole = pack_table([{"a": [1, 2, 3], "b": "x"}, {"a": [4], "b": "y"}])
    for broken in (data, whole[: cut % len(whole)], whole[: cut % len(whole)] + data):
        with contextlib.suppress(ValueError):
            assert isinstance(unpack_table(broken), list)


def test_lists_of_tuples_come_back_as_they_were():
    rows = [{"spans": [("run:1", 0, 4), ("run:2", 4, 6)]}, {"spans": []}]
    assert unpack_table(pack_table(rows)) == rows


def test_rows_whose_names_are_in_another_order_come_back():
    rows = [{"a": 1, "b": [5]}, {"b": [6, 7], "a": 2}]
    assert unpack_table(pack_table(rows)) == rows
