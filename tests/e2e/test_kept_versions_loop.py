"""A run that takes ratios against the weights of earlier pushes: replayed, killed and resumed."""

import time

import pytest
from loop_helpers import make_world, run_train, series, start_train

NUM_ROLLOUT = 12
COMPARED = ("train/loss", "train/grad_norm", "train/ppo_kl")


@pytest.mark.slow
def test_a_killed_run_with_kept_versions_ends_as_one_that_was_not(tmp_path):
    world = make_world(tmp_path)
    dump = f"{world}/dump/{{rollout_id}}.pt"
    common = {"script": "train_async.py", "num_rollout": NUM_ROLLOUT, "keep_old_actor": True, "lr": 3e-3}
    run_train(world, "live", **common, save_debug_rollout_data=dump)
    run_train(world, "whole", **common, load_debug_rollout_data=dump)
    # Samples of the push before: without its weights the ratios could not be what they are.
    assert (
        sum(abs(value) > 1e-4 for value in series(world, "whole", "train/ppo_kl").values()) >= NUM_ROLLOUT - 2
    )

    saved = {
        "load_debug_rollout_data": dump,
        "save": world / "ckpt",
        "load": world / "ckpt",
        "save_interval": 1,
    }
    for after in (3, 8):
        process = start_train(world, "killed", **common, **saved)
        while len(series(world, "killed", "train/loss")) < after:
            assert process.poll() is None, (world / "killed.out").read_text()[-4000:]
            time.sleep(0.01)
        process.kill()
        process.wait()
    run_train(world, "killed", **common, **saved)
    for metric in COMPARED:
        assert series(world, "killed", metric) == series(world, "whole", metric), metric  # bit for bit
        assert series(world, "whole", metric) == pytest.approx(series(world, "live", metric), abs=1e-5), (
            metric
        )
