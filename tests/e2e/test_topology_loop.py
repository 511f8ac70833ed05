"""Runs over other engines than one model's own: a frozen
model beside the policy, and engines that already run.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
from loop_helpers import ROOT, make_world, run_train, series, start_train, wait_for
from tiny_model import make_tiny_model

from slime.record import Select, open_record
from slime.record.audit import audit
from slime.utils.files.run_file import read_run
from slime.utils.machine.ports import find_available_port

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


@contextlib.contextmanager
def engine_of_somebody_else(world):
    """An engine that no run has started: its process and its address."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "slime.engines.embedded", "--model-path", str(world / "model")]
    command += ["--host", "127.0.0.1", "--port", "0", "--life-fd", str(read_end)]
    command += ["--ready-file", str(world / "ready"), "--shm-prefix", "external"]
    command += ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
    engine = subprocess.Popen(command, pass_fds=[read_end], cwd=ROOT)
    try:
        while not (world / "ready").exists():
            assert engine.poll() is None
            time.sleep(0.1)
        yield engine, f"127.0.0.1:{json.loads((world / 'ready').read_text())['port']}"
    finally:
        engine.kill()
        engine.wait()
        os.close(write_end)


def slime(*words):
    return subprocess.run([sys.executable, "-m", "slime", *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_an_engine_joins_a_running_run_with_the_current_weights_and_the_first_one_leaves(world, workers):
    """A port for the router puts a balancer in front of the run's only engine."""
    run = str(world / "run")
    more = {
        "rollout_workers": workers,
        "num_rollout": 400,
        "sglang_router_port": find_available_port(20000),
        "save": world / "ckpt",
    }
    with engine_of_somebody_else(world) as (engine, address):
        process = start_train(world, "run", save_interval=1000, **more)
        try:
            wait_for(lambda: series(world, "run", "perf/step_time"), process)
            wrong = slime("engines", "add", run, "127.0.0.1:9")
            assert wrong.returncode == 1 and "no engine responds at http://127.0.0.1:9" in wrong.stdout
            joined = slime("engines", "add", run, address)
            text = f"http://{address} joined with the current weights; engines that generate: 2"
            assert joined.returncode == 0 and text in joined.stdout, joined.stdout + joined.stderr
            again = slime("engines", "add", run, address)
            assert again.returncode == 1 and "is an engine of this run already" in again.stdout
            unknown = slime("engines", "remove", run, "127.0.0.1:9")
            assert unknown.returncode == 1 and "no such engine generates; there are " in unknown.stdout
            [own] = {url.strip() for url in unknown.stdout.partition("there are")[2].split(",")} - {
                f"http://{address}"
            }
            left = slime("engines", "remove", run, own)
            assert left.returncode == 0 and f"{own} left; engines that generate: 1" in left.stdout, (
                left.stdout
            )
            before = len(series(world, "run", "perf/step_time"))
            wait_for(lambda: len(series(world, "run", "perf/step_time")) > before + 2, process)
            last = slime("engines", "remove", run, address)
            assert last.returncode == 1 and "it is the only engine that generates" in last.stdout
            assert slime("ask", run, "stop").returncode == 0
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
        assert engine.poll() is None, "it is somebody else's, and was left running"
    shown = (world / "run.out").read_text()
    assert text in shown and f"{own} left" in shown
    assert not any(series(world, "run", "perf/engines_evicted").values()), shown[-4000:]
    assert not any(series(world, "run", "rollout/groups/failed").values())
    assert audit(world / "run" / "record.db", finished=False).violations == []
    with open_record(world / "run") as record:
        last_step = max(row.rollout_id for row in record.rollouts())
        samples = record.samples(Select(kind="train", rollout_id=last_step))
        versions = {version for sample in samples for version, *_ in record.tokens(sample.row).versions}
    assert versions == {f"{read_run(world / 'run').id}:{last_step + 1}"}


@pytest.mark.slow
def test_engines_that_already_run_are_used_and_left_running(world):
    with engine_of_somebody_else(world) as (engine, address):
        run_train(world, "run", num_rollout=2, rollout_external_engine_addrs=[address])
        assert len(series(world, "run", "rollout/raw_reward")) == 2
        assert engine.poll() is None
        wrong = run_train(
            world, "wrong", num_rollout=2, rollout_external_engine_addrs=["127.0.0.1:9"], check=False
        )
        assert wrong.returncode == 2 and "no engine responds at http://127.0.0.1:9" in wrong.stderr
