"""train_async.py with a pool of groups in flight: real
engine, real pushes in mid-generation, and a resumed run.
"""

import pytest
from loop_helpers import make_world, run_train, series

from slime.rollout.dumps import load_rollout_dump
from slime.utils.types import flatten_samples

ASYNC = {
    "script": "train_async.py",
    "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "max_weight_staleness": 1,
}


@pytest.mark.slow
def test_the_pool_stays_within_its_bound_and_a_resumed_run_loses_and_repeats_nothing(tmp_path):
    world = make_world(tmp_path)
    dump = f"{world}/dump_{{rollout_id}}.pt"
    common = {
        **ASYNC,
        "save": world / "ckpt",
        "save_interval": 2,
        "save_debug_rollout_data": dump,
    }
    run_train(world, "first", num_rollout=4, **common)
    run_train(world, "second", num_rollout=6, load=world / "ckpt", **common)
    for run in ("first", "second"):
        staleness = series(world, run, "rollout/staleness/max") or series(world, run, "staleness/max")
        assert staleness and max(staleness.values()) <= 1
    indices = [s.index for i in range(6) for s in flatten_samples(load_rollout_dump(dump, i))]
    assert len(indices) == len(set(indices)) == 6 * 16
    assert max(indices) < 8 * 16  # nothing far ahead of what was trained: what the pool held was used
