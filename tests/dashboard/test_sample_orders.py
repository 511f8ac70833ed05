"""Orders of answers: a record of few samples is sorted as a whole, a larger one is read along indexes."""

import contextlib
import sqlite3

import pytest
from page_world import make_run

from slime.dashboard import sample_pages
from slime.dashboard.sample_pages import ORDERS, Positions, Wanted, page
from slime.record import sample_rows

SORTED = ("samples_by_reward", "samples_by_length", "groups_by_spread")


@contextlib.contextmanager
def opened(folder):
    with contextlib.closing(sqlite3.connect(folder / "record.db")) as connection:
        yield connection


def order_indexes(connection):
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")]
    return [name for name in names if name in SORTED]


def all_pages(connection, order):
    rows, after = [], ""
    while True:
        found = page(
            connection, Wanted("train", order=order), Positions(), offset=len(rows), limit=7, after=after
        )
        assert found["rows"] or not found["after"], "a page without rows that is asked for again and again"
        rows += found["rows"]
        after = found["after"]
        if not found["rows"] or (found["total"] is None and not after):
            return [row["id"] for row in rows]


def test_few_samples_have_no_indexes_and_many_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_rows, "MANY_SAMPLES", 9)  # two steps of eight
    with opened(make_run(tmp_path / "few", steps=1)) as connection:
        assert order_indexes(connection) == []
    with opened(make_run(tmp_path / "many", steps=2)) as connection:
        assert sorted(order_indexes(connection)) == sorted(SORTED)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_the_same_with_and_without_indexes(tmp_path, monkeypatch, order):
    with opened(make_run(tmp_path / "few")) as connection:
        few = all_pages(connection, order)
    monkeypatch.setattr(sample_rows, "MANY_SAMPLES", 1)
    with opened(make_run(tmp_path / "many")) as connection:
        assert all_pages(connection, order) == few and len(few) == 48


def test_few_samples_are_sorted_to_the_end_where_that_takes_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_pages, "_DEADLINE_S", -1.0)
    monkeypatch.setattr(sample_pages, "_LOOK_STEPS", 10)
    with opened(make_run(tmp_path / "few")) as connection:
        assert len(all_pages(connection, "best")) == 48
