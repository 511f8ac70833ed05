"""A reduced set of the kills of `make test-crash`; of the synchronous loop among the slow tests."""

from pathlib import Path

import pytest

from tests.crash import chains
from tests.crash.victim import POINTS, TARGETS, set_trap

# One list of strikes for each start of the run, each at the point itself.
STARTS = {
    "train.py": [
        [{"point": "generation", "nth": 2, "delay_s": 0, "target": "driver"}],
        [{"point": "checkpoint before its rename", "nth": 1, "delay_s": 0, "target": "driver"}],
    ],
    "an environment whose steps are never repeated": [
        [{"point": "generation", "nth": 30, "delay_s": 0, "target": "driver"}],
        [
            {"point": "generation", "nth": 8, "delay_s": 0, "target": "engine"},
            {"point": "step of an environment", "nth": 20, "delay_s": 0, "target": "driver"},
        ],
        [{"point": "call recorded", "nth": 5, "delay_s": 0, "target": "driver"}],
    ],
    "a session with a sandbox": [
        [{"point": "turn recorded", "nth": 30, "delay_s": 0, "target": "driver"}],
        [{"point": "result of a tool call", "nth": 9, "delay_s": 0, "target": "driver"}],
        [{"point": "tool call", "nth": 12, "delay_s": 0, "target": "driver"}],
    ],
    "fully asynchronous": [
        [{"point": "rollout handed over", "nth": 2, "delay_s": 0, "target": "driver"}],
        [
            {"point": "step", "nth": 1, "delay_s": 0, "target": "trainer"},  # which the run survives
            {"point": "checkpoint completed", "nth": 1, "delay_s": 0, "target": "driver"},
        ],
    ],
    "fully asynchronous, each start on another host": [
        [{"point": "checkpoint before its rename", "nth": 1, "delay_s": 0, "target": "driver"}],
        [{"point": "checkpoint after its rename", "nth": 1, "delay_s": 0, "target": "driver"}],
        [{"point": "push", "nth": 2, "delay_s": 0, "target": "driver"}],
    ],
}


FAST = "fully asynchronous"
CASES = [mode if mode == FAST else pytest.param(mode, marks=pytest.mark.slow) for mode in STARTS]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", CASES)
def test_a_killed_run_ends_as_an_undisturbed_one_bit_for_bit(mode, tmp_path, monkeypatch):
    world = chains.make_world(tmp_path / "world")
    chains.reference(world, mode, 3)
    starts = iter(STARTS[mode])
    monkeypatch.setattr(chains, "draw_plans", lambda draw, mode: next(starts))
    plans = [plan for start in STARTS[mode] for plan in start]
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
