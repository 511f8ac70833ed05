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


@pytest.fixture(scope="module")
def plain(world):
    return numbers(world, "plain")


# By default the seed of rollouts is `--seed` (tests/arguments/test_seeds.py).
@pytest.mark.parametrize("flag", ["seed", pytest.param("rollout_seed", marks=pytest.mark.slow)])
def test_changing_a_seed_flag_changes_what_is_sampled_and_trained(world, plain, flag):
    for before, now in zip(plain, numbers(world, flag, **{flag: 7}), strict=True):
        assert before and before != now
