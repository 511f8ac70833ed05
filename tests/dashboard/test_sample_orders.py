"""Lists of samples in every order, read along indexes."""

import contextlib
import sqlite3

import pytest
from page_world import make_run

from slime.dashboard import sample_pages
from slime.dashboard.sample_pages import ORDERS, Positions, Wanted, page


@contextlib.contextmanager
def opened(folder):
    with contextlib.closing(sqlite3.connect(folder / "record.db")) as connection:
        yield connection


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


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_reaches_all_samples_once(tmp_path, order):
    with opened(make_run(tmp_path / "run")) as connection:
        found = all_pages(connection, order)
    assert len(found) == len(set(found)) == 48


def test_a_query_that_takes_too_long_continues_where_it_stopped(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    with opened(folder) as connection:
        whole = all_pages(connection, "best")
        monkeypatch.setattr(sample_pages, "_DEADLINE_S", -1.0)
        monkeypatch.setattr(sample_pages, "_LOOK_STEPS", 10)
        stopped = page(connection, Wanted("train", order="best"), Positions(), limit=7)
        monkeypatch.undo()
        assert not stopped["complete"] and len(stopped["rows"]) < 7
        rest = page(connection, Wanted("train", order="best"), Positions(), limit=100, after=stopped["after"])
    assert [row["id"] for row in stopped["rows"] + rest["rows"]] == whole
