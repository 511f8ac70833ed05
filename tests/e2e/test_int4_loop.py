"""A run whose engine holds INT4 weights: the trainer computes with the same ones at every version."""

from loop_helpers import make_world, run_train, series


def test_engine_and_trainer_agree_at_every_version_of_int4_weights(tmp_path):
    world = make_world(tmp_path)
    run_train(world, "run", rollout_quantization="int4", check_weight_update_equal=True, lr=1e-2)
    apart = series(world, "run", "train/train_rollout_logprob_abs_diff")
    assert len(apart) == 3 and max(apart.values()) < 1e-4
    assert all(norm > 0 for norm in series(world, "run", "train/grad_norm").values())
