"""A reduced set of the kills of `make test-crash`: three in a fully asynchronous run."""

from pathlib import Path

import pytest
from crash import chains
from crash.victim import POINTS, TARGETS, set_trap

STARTS = [
    [{"point": "rollout handed over", "nth": 2, "delay_s": 0, "target": "driver"}],
    [
        {"point": "step", "nth": 1, "delay_s": 0.01, "target": "trainer"},  # which the run survives
        {"point": "checkpoint completed", "nth": 1, "delay_s": 0, "target": "driver"},
    ],
]


@pytest.mark.timeout(1800)
def test_a_killed_asynchronous_run_ends_as_an_undisturbed_one_bit_for_bit(tmp_path, monkeypatch):
    world, mode = chains.make_world(tmp_path / "world"), "fully asynchronous"
    chains.reference(world, mode, 3)
    starts = iter(STARTS)
    monkeypatch.setattr(chains, "draw_plans", lambda draw, mode: next(starts))
    plans = [plan for start in STARTS for plan in start]
    result = chains.chain(world, "killed", mode, 3, None, most=len(plans))
    assert result.wrong == []
    assert [kill["point"] for kill in result.kills] == [plan["point"] for plan in plans]


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_a_function_that_is_there(point, monkeypatch):
    import importlib

    module, _, path = POINTS[point].partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    before = getattr(owner, name)
    set_trap({"point": point, "nth": 10**9, "delay_s": 0, "target": next(iter(TARGETS))}, Path())
    assert getattr(owner, name) is not before
