"""What --peer-copies goes together with, and what it says of its cost."""

import pytest
from argument_helpers import parse
from tiny_model import make_tiny_model

from slime.preflight.run_plan import Device, plan_run


def test_copies_are_whole_checkpoints_of_one_machine():
    with pytest.raises(ValueError, match="--peer-copies needs the optimizer"):
        parse(peer_copies=1, no_save_optim=True)
    assert parse(peer_copies=1, actor_num_nodes=2).peer_copies == 1
    with pytest.raises(ValueError, match="megatron and --actor-num-nodes 2: its checkpoints need one"):
        parse(peer_copies=1, actor_num_nodes=2, train_backend="megatron")
    assert parse(peer_copies=1, save="x", async_save=True).async_save is False
    assert parse(peer_copies=1, max_restarts=0).peer_copies == 0


def test_a_plan_says_what_they_take(tmp_path):
    model = str(make_tiny_model(tmp_path / "model"))
    plan = plan_run(parse(hf_checkpoint=model, peer_copies=1), Device(1e9, False))
    assert plan.copies == pytest.approx(2 * (plan.trainer["weights"] + plan.trainer["optimizer"]))
    assert any("--peer-copies" in line for line in plan.lines(None))
