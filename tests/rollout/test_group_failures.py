"""What becomes of a group when one of its samples cannot be generated: --group-failure-action."""

import asyncio

import pytest
import rollout_plugins
from fake_engine import FakeEngine, sample_index
from rollout_helpers import assert_conserved, counts, make_args, make_source

from slime.liveness.wait_table import collapse, rows_of_this_process
from slime.rollout.collection.collector import MAX_FAILED_IN_A_ROW, GroupFailed
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import HttpError


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def sample_3_is_refused(payload, number):
    return 400 if sample_index(payload) == 3 else None


def sample_3_is_garbage(payload, number):
    return "garbage" if sample_index(payload) == 3 else None


def test_drop_counts_the_group_and_fills_its_place(tmp_path):
    with FakeEngine(sample_3_is_refused, takes_groups=False) as engine:
        args = make_args(tmp_path, engine, "--group-failure-action", "drop")
        source = make_source(args)
        output = generate_rollout(args, 0, source)
        assert sum(sample_index(r) == 3 for r in engine.requests) == 1  # a 4xx is not tried again
    assert [group[0].group_index for group in output.samples] == [0, 2, 3, 4]
    assert counts(source)["failed"] == 1 and output.metrics["rollout/groups/failed"] == 1
    assert_conserved(source)


def test_retry_generates_the_group_again_with_other_seeds(tmp_path):
    def garbage_at_first(payload, number):
        return "garbage" if sample_index(payload) == 3 and number < 12 else None

    with FakeEngine(garbage_at_first) as engine:
        args = make_args(tmp_path, engine, "--group-failure-action", "retry")
        source = make_source(args)
        for rollout_id in range(2):
            output = generate_rollout(args, rollout_id, source)
            assert len(output.samples) == 4
        seeds = {r["sampling_params"]["sampling_seed"] for r in engine.requests if sample_index(r) == 3}
    assert len(seeds) >= 2
    assert "failed" not in counts(source)
    assert_conserved(source)


def test_stop_ends_the_run_with_the_cause(tmp_path):
    with FakeEngine(sample_3_is_refused) as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        with pytest.raises(HttpError, match="answered 400"):
            generate_rollout(args, 0, source)
    assert_conserved(source)


def test_a_group_is_tried_as_often_as_it_is_told(tmp_path):
    with FakeEngine(sample_3_is_garbage, takes_groups=False) as engine:
        args = make_args(tmp_path, engine, "--limits", "group-attempts=5")
        with pytest.raises(GroupFailed, match="5 attempts were made"):
            generate_rollout(args, 0, make_source(args))
        assert sum(sample_index(r) == 3 for r in engine.requests) == 5


def test_groups_that_all_fail_stop_the_run_although_each_could_be_dropped(tmp_path):
    with FakeEngine(lambda payload, number: 400) as engine:
        args = make_args(tmp_path, engine, "--group-failure-action", "drop")
        source = make_source(args)
        with pytest.raises(GroupFailed, match=f"{MAX_FAILED_IN_A_ROW} groups in a row failed.*answered 400"):
            generate_rollout(args, 0, source)
    assert_conserved(source)


SEEN: list = []  # what the table of waits holds while a generate function runs


async def never_returns(args, sample, sampling_params):
    SEEN.extend(collapse(rows_of_this_process()))
    await asyncio.Event().wait()


def test_a_generate_function_that_never_returns_is_named_with_its_deadline(tmp_path):
    name = f"--custom-generate-function-path {__name__}.never_returns"
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, *name.split(), "--timeouts", "custom-generate=0.2")
        source = make_source(args)
        with pytest.raises(GroupFailed, match=r"never_returns did not return within .*generate=0\.2"):
            generate_rollout(args, 0, source)
    [row] = [row for row in SEEN if row.what == name][:1]
    assert (row.owner, row.deadline_s) == ("rollout", 0.2)
    assert_conserved(source)
