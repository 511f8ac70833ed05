"""Changing a seed flag changes the run, also a plain one that has neither adapters nor a critic."""

import pytest
from loop_helpers import make_world, run_train, series

pytestmark = pytest.mark.timeout(1200)

NAMES = ("rollout/rollout_log_probs", "train/grad_norm")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("seeds"))


def numbers(world, run, **seeds):
    run_train(world, run, num_rollout=1, **seeds)
    return [series(world, run, name) for name in NAMES]


def test_changing_each_seed_flag_changes_what_is_sampled_and_trained(world):
    plain = numbers(world, "plain")
    by_seed = numbers(world, "by-seed", seed=7)
    by_rollout_seed = numbers(world, "by-rollout-seed", rollout_seed=7)
    for before, now in zip(plain, by_seed, strict=True):
        assert before and before != now
    for before, now in zip(plain, by_rollout_seed, strict=True):
        assert before and before != now
