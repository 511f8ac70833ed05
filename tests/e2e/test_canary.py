"""The canary in whole runs: it hears engine and trainer agree, changes nothing, and says what it finds."""

import json

import pytest
import torch
from loop_helpers import make_world, run_train, series

AGREES = 1e-3  # float32 on both sides, in other orders of summation


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("canary"))


def checksums(world, name):
    manifest = json.loads((world / f"{name}-ckpt" / "step_0000001" / "manifest.json").read_text())
    return {file: record for file, record in manifest["files"].items() if file.endswith(".distcp")}


@pytest.mark.slow
def test_a_run_ends_bit_identical_with_and_without_it_and_with_rollout_workers(world):
    settings = {"num_rollout": 2, "deterministic_mode": True, "save_interval": 2, "rollout_temperature": 0.8}
    for name, interval, workers in (("with", 1, 2), ("without", 0, 1)):
        changes = {"canary_interval": interval, "rollout_workers": workers}
        run_train(world, name, **changes, save=world / f"{name}-ckpt", **settings)
    for metric in ("train/loss", "train/grad_norm", "rollout/raw_reward", "rollout/response_len/mean"):
        assert series(world, "with", metric) == series(world, "without", metric), metric
    assert checksums(world, "with") == checksums(world, "without") != {}
    states = [
        torch.load(world / f"{name}-ckpt/step_0000001/trainer/rng_0.pt") for name in ("with", "without")
    ]
    assert torch.equal(states[0]["torch"], states[1]["torch"])
    heard = series(world, "with", "rollout/canary/mean_abs_diff")
    assert sorted(heard) == [0, 1, 2] and all(0 < value < AGREES for value in heard.values())
    assert not series(world, "without", "rollout/canary/mean_abs_diff")


@pytest.mark.slow
def test_adapters_that_are_sent_alone_in_the_asynchronous_loop_are_heard_too(world):
    adapters = {"lora_rank": 4, "lora_sync": "adapter", "lora_alpha": 8}
    run_train(world, "lora", script="train_async.py", canary_interval=1, num_rollout=2, lr=1e-2, **adapters)
    heard = series(world, "lora", "rollout/canary/mean_abs_diff")
    assert len(heard) == 3 and all(0 < value < AGREES for value in heard.values())


def test_a_difference_is_told_with_its_pattern_the_push_and_the_tensors(world):
    # No rounding fits into this threshold: what is checked is what is said of it.
    done = run_train(world, "apart", check=False, num_rollout=1, logprob_diff_threshold=1e-9)
    said = done.stdout + done.stderr
    assert "the canary: engine-0 and the trainer" in said and "after push 1. Pattern:" in said
    assert "have not agreed since this run began" in said
    assert "All of its tensors match what was sent, by their checksums" in said
