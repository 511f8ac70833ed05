"""A run of train_async.py that is interrupted and resumed takes the very steps of one that was not."""

import pytest
from loop_helpers import make_world, run_train, series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

COMPARED = ("train/loss", "train/grad_norm", "rollout/raw_reward", "rollout/weight_version/min")
ROLLOUTS, SAVED = 6, 2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """With the whole run in it, which saved after every rollout."""
    folder = make_world(tmp_path_factory.mktemp("async-resume"))
    run_train(folder, "whole", **settings(), save=folder / "ckpt", save_interval=1)
    return folder


def settings(**changes):
    values = {
        "script": "train_async.py",
        "num_rollout": ROLLOUTS,
        "deterministic_mode": True,
        "global_batch_size": 8,
        "timeout": 600,
    }
    return {**values, **changes}


def resume(world, name, **changes):
    return run_train(world, name, **settings(load=world / "ckpt", ckpt_step=SAVED, **changes))


def after(steps, name):
    first = (SAVED + 1) * (2 if name.startswith("train/") else 1)  # two optimizer steps a rollout
    return {step: value for step, value in steps.items() if step >= first}


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(world):
    ended = resume(world, "resumed")
    for name in COMPARED:
        whole, resumed = series(world, "whole", name), series(world, "resumed", name)
        assert len(resumed) >= ROLLOUTS - SAVED - 1
        assert resumed == after(whole, name), name
    assert "differ from an uninterrupted one" not in ended.stderr


def test_the_synchronous_loop_says_that_it_makes_the_batch_anew(world):
    ended = run_train(
        world, "by-train", load=world / "ckpt", ckpt_step=SAVED, num_rollout=SAVED + 2, global_batch_size=8
    )
    assert f"the asynchronous loop was generating rollout {SAVED + 1}, which starts again" in ended.stderr
    assert list(series(world, "by-train", "rollout/raw_reward")) == [SAVED + 1], (
        "no prompts are skipped, none twice"
    )
