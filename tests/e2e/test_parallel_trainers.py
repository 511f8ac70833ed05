"""Whole runs in which two trainer ranks share one replica, or
train adapters: same samples, same curve as one plain rank.
"""

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
def test_a_run_with_adapters_is_the_same_whether_they_are_pushed_merged_or_alone(tmp_path):
    world = make_world(tmp_path)
    for sync in ("merged", "adapter"):
        run_train(world, sync, lora_rank=4, lora_sync=sync, lr=1e-2, num_rollout=3)
        # The engine samples with what it was sent: its log-probs are those of the trained adapters.
        assert max(series(world, sync, "train/train_rollout_logprob_abs_diff").values()) < 1e-4
    merged, alone = (series(world, sync, "train/loss") for sync in ("merged", "adapter"))
    assert alone == pytest.approx(merged, rel=1e-3, abs=1e-5)
    sent = [series(world, sync, "perf/update_weights_bytes") for sync in ("adapter", "merged")]
    assert max(sent[0].values()) < min(sent[1].values()) / 4
