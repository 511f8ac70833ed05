"""How often engines get new weights."""

import pytest
from argument_helpers import parse
from loop_helpers import make_world, run_train, series

from slime.loop import train


def test_the_synchronous_loop_refuses_an_interval_that_it_would_not_keep(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the test must not ask the hub
    with pytest.raises(ValueError, match=r"--update-weights-interval: it needs train_async\.py"):
        train(parse(update_weights_interval=2))


@pytest.mark.slow
def test_the_asynchronous_loop_pushes_once_in_an_interval(tmp_path):
    world = make_world(tmp_path)
    run_train(world, "run", script="train_async.py", num_rollout=5, update_weights_interval=2)
    assert series(world, "run", "rollout/weight_version") == {0: 1, 2: 2, 4: 3}
    assert len(series(world, "run", "rollout/raw_reward")) == 5
