"""Whole runs in which two trainer ranks share one replica, or train adapters: same samples, same curve as one plain rank."""

import pytest
from loop_helpers import make_world, run_train, series

VARIANTS = {
    "context": dict(actor_num_gpus_per_node=2, num_gpus_per_node=2, context_parallel_size=2),
    "tensor": dict(actor_num_gpus_per_node=2, num_gpus_per_node=2, tensor_model_parallel_size=2),
}


@pytest.mark.slow
def test_two_ranks_that_share_a_replica_learn_the_same_curve(tmp_path):
    world = make_world(tmp_path)
    run_train(world, "plain", deterministic_mode=True)
    expected = series(world, "plain", "train/loss")
    assert len(expected) == 3
    for name, changes in VARIANTS.items():
        run_train(world, name, deterministic_mode=True, **changes)
        assert series(world, name, "train/loss") == pytest.approx(expected, rel=1e-2, abs=1e-4), name


@pytest.mark.slow
def test_a_run_with_adapters_pushes_merged_weights(tmp_path):
    world = make_world(tmp_path)
    run_train(world, "lora", lora_rank=4, lr=1e-2, num_rollout=2)
    # The engine samples with what it was sent: its log-probs are those of the trained adapters.
    assert max(series(world, "lora", "train/train_rollout_logprob_abs_diff").values()) < 1e-3
