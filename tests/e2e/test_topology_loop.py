"""Runs over other engines than one model's own: a frozen
model beside the policy, and engines that already run.
"""

import json
import os
import subprocess
import sys
import time

import pytest
from loop_helpers import ROOT, make_world, run_train, series
from tiny_model import make_tiny_model

ASK_TEACHER = """
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post


async def reward(args, sample, **kwargs):
    payload = {"input_ids": sample.tokens[:4], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = await post(get_model_url(args, "teacher"), payload)
    frozen = answer["meta_info"]["weight_version"] == "default" and set(sample.weight_versions) != {"default"}
    return float(frozen) + 0.01 * (sample.index % 7)
"""


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


def test_a_frozen_model_beside_the_policy_is_asked_by_its_name_and_never_pushed_to(world):
    make_tiny_model(world / "teacher")
    (world / "reward.py").write_text(ASK_TEACHER)
    models = [
        {"name": "policy", "server_groups": [{"num_gpus": 1}]},
        {"name": "teacher", "model_path": str(world / "teacher"), "server_groups": [{"num_gpus": 1}]},
    ]
    (world / "topology.yaml").write_text(json.dumps({"sglang": models}))
    run_train(world, "run", num_rollout=2, rollout_engine="embedded", sglang_config=world / "topology.yaml")
    assert all(value > 1.0 for value in series(world, "run", "rollout/raw_reward").values())
    assert (world / "run" / "logs" / "teacher-engine-0.log").exists()


@pytest.mark.slow
def test_engines_that_already_run_are_used_and_left_running(world):
    read_end, write_end = os.pipe()
    command = [
        sys.executable,
        "-m",
        "slime.engines.embedded",
        "--model-path",
        str(world / "model"),
        "--port",
        "0",
    ]
    command += ["--host", "127.0.0.1", "--ready-file", str(world / "ready"), "--life-fd", str(read_end)]
    command += ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--shm-prefix", "external"]
    engine = subprocess.Popen(command, pass_fds=[read_end], cwd=ROOT)
    try:
        while not (world / "ready").exists():
            assert engine.poll() is None
            time.sleep(0.1)
        address = f"127.0.0.1:{json.loads((world / 'ready').read_text())['port']}"
        run_train(world, "run", num_rollout=2, rollout_external_engine_addrs=[address])
        assert len(series(world, "run", "rollout/raw_reward")) == 2
        assert engine.poll() is None
        wrong = run_train(
            world, "wrong", num_rollout=2, rollout_external_engine_addrs=["127.0.0.1:9"], check=False
        )
        assert wrong.returncode == 2 and "no engine responds at http://127.0.0.1:9" in wrong.stderr
    finally:
        engine.kill()
        engine.wait()
        os.close(write_end)
