"""The table of waits: what is in it, how it is told, and the chain from a run to who holds it up."""

import math
import time

from slime.liveness import waits
from slime.liveness.wait_table import (
    WaitRow,
    chain_of_causes,
    collapse,
    read_table,
    row_of,
    rows_of_this_process,
    write_table,
)

NOW = time.time()


def row(owner, what, target="", age=1.0, deadline=None):
    return WaitRow(owner, what, target, NOW - age, deadline)


def test_overdue_waits_are_read_first(tmp_path):
    write_table(tmp_path, [row("driver", "old", age=500), row("driver", "late", age=20, deadline=10)])
    table = read_table(tmp_path)
    assert [r.what for r in table.rows] == ["late", "old"] and [r.what for r in table.overdue] == ["late"]
    assert "deadline 10 s OVERDUE" in table.rows[0].describe(table.time)


def test_a_folder_without_a_table_or_with_half_of_one_has_none(tmp_path):
    assert read_table(tmp_path) is None
    (tmp_path / "waits.json").write_text('{"time": 3, "waits": [{"owner"')
    assert read_table(tmp_path) is None


def test_a_thousand_requests_are_one_row_with_the_oldest():
    rows = [row("driver", f"POST http://e/generate (request {i})", "engine-0", age=i) for i in range(1000)]
    [one] = collapse(rows)
    assert one.count == 1000 and one.since == NOW - 999


def test_the_chain_leads_from_the_run_over_ranks_to_the_one_that_is_stopped():
    rows = [
        row("run", "training", age=65),
        row("driver", "trainer-0.train and 1 more", "trainer-0, trainer-1", age=64),
        row("trainer-0", "train: stands in all_reduce (slime/step/losses.py:3)", "the other ranks", age=62),
        row("the watch", "a sign of life (its process is stopped)", "trainer-1", age=63, deadline=60),
        row("trainer-9", "something else"),
    ]
    chain = chain_of_causes(rows)
    assert [line.split(",")[0] for line in chain] == [
        "run waits: training",
        "driver waits for trainer-0",
        "trainer-0 waits for the other ranks: train: stands in all_reduce (slime/step/losses.py:3)",
        "trainer-9 waits: something else",
        "the watch waits for trainer-1: a sign of life (its process is stopped)",
    ]


def test_waits_of_this_process_have_names_of_engines_and_no_infinite_deadline():
    waits.know_as("http://127.0.0.1:5", "engine-7")
    with waits.waiting("POST /pause", deadline_s=math.inf, target="http://127.0.0.1:5/"):
        found = [r for r in rows_of_this_process() if r.what == "POST /pause"]
    assert (found[0].owner, found[0].target, found[0].deadline_s) == ("driver", "engine-7", None)
    assert row_of("trainer-0", "x", "", 2.0, 5.0).age_s(time.time()) >= 2.0


def test_a_breach_remembers_who_else_waited():
    with waits.waiting("the whole"):
        try:
            waits.until(lambda: False, "a part", 0.0)
        except waits.WaitTimeout as error:
            breach = error
    assert {"the whole", "a part"} <= {wait.name for wait in breach.others}
