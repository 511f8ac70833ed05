"""The whole loop with the Megatron trainer: two tensor-parallel ranks
train, save in the background, resume, and engines get their weights.
"""

import pytest
from loop_helpers import make_world, run_train, series

pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

LAYOUT = dict(train_backend="megatron", tensor_model_parallel_size=2, actor_num_gpus_per_node=2)


def test_tensor_parallel_ranks_train_save_and_resume(tmp_path):
    world = make_world(tmp_path)
    kept = dict(save=world / "ckpt", save_interval=1, async_save=True, keep_last_n=1)
    run_train(world, "first", num_rollout=2, **kept, **LAYOUT)
    assert [path.name for path in (world / "ckpt").iterdir()] == ["step_0000001"], (
        "whole, and the last one only"
    )
    run_train(world, "second", load=world / "ckpt", num_rollout=3, **LAYOUT)
    differences = series(world, "first", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2 and max(differences.values()) < 1e-3, (
        "engine and trainer must hold the same weights"
    )
    assert list(series(world, "second", "train/grad_norm")) == [2]


def test_adapters_are_pushed_merged_or_alone_and_resume(tmp_path):
    world = make_world(tmp_path)
    for sync in ("merged", "adapter"):
        run_train(world, sync, lora_rank=4, lora_sync=sync, lr=1e-2, save=world / f"{sync}-ckpt", **LAYOUT)
        # The engine samples with what it was sent: its log-probs are those of the trained adapters.
        assert max(series(world, sync, "train/train_rollout_logprob_abs_diff").values()) < 1e-4
    merged, alone = (series(world, sync, "train/loss") for sync in ("merged", "adapter"))
    assert alone == pytest.approx(merged, rel=1e-3, abs=1e-5)
    sent = [series(world, sync, "perf/update_weights_bytes") for sync in ("adapter", "merged")]
    assert max(sent[0].values()) < min(sent[1].values()) / 4
    run_train(world, "on", lora_rank=4, lr=1e-2, load=world / "adapter-ckpt", num_rollout=4, **LAYOUT)
    assert list(series(world, "on", "train/grad_norm")) == [3]
