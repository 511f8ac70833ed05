"""MTP heads that train beside the policy draft for it on a real SGLang, and get better at it."""

import subprocess
import sys

import pytest
from loop_helpers import ROOT, make_world, run_train, series

from slime.arguments.core.devices import visible_gpus
from slime.arguments.passthrough.sglang_flags import find_python

pytestmark = [pytest.mark.sglang, pytest.mark.megatron, pytest.mark.slow]

STEPS = 12
EQUAL = """async def reward(args, sample, **kwargs):
    return 1.0
"""


def test_heads_that_train_reach_the_draft_of_the_engine(tmp_path):
    pytest.importorskip("megatron.core")
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    if not visible_gpus():
        pytest.skip("SGLang's kernels for speculation need a GPU")
    world = make_world(tmp_path / "world")
    (world / "reward.py").write_text(EQUAL)  # the policy stays: at this rate it would be lost
    model = world / "copying"
    words = ["benchmarks/speculative.py", "--write-model", model, "--shape", "tiny", "--mtp-head"]
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, timeout=300)
    run_train(
        world,
        "run",
        timeout=1200,
        hf_checkpoint=model,
        num_rollout=STEPS,
        rollout_batch_size=8,
        global_batch_size=32,
        rollout_max_response_len=64,
        max_tokens_per_gpu=4096,
        lr=1e-2,
        dtype="float32",
        rollout_engine="sglang",
        timeouts="engine-start=900",
        train_backend="megatron",
        enable_mtp_training=True,
        mtp_loss_scaling_factor=1.0,
        sglang_trust_remote_code=True,
        sglang_speculative_algorithm="EAGLE",
        sglang_speculative_num_steps=2,
        sglang_speculative_eagle_topk=1,
        sglang_speculative_num_draft_tokens=3,
        sglang_speculative_draft_model_path=model,
    )
    accepted = series(world, "run", "rollout/spec_accept_rate")
    assert accepted[0] < 0.02, "the head has learnt nothing yet"
    assert accepted[STEPS - 1] > 0.05
    differences = series(world, "run", "train/train_rollout_logprob_abs_diff")
    assert set(differences) == set(range(STEPS)) and max(differences.values()) < 1e-4
