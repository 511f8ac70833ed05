"""Runs whose weights travel as deltas, to the embedded engine and to SGLang."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loop_helpers import ROOT, make_world, run_train, series

from slime.arguments.passthrough.sglang_flags import find_python

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


def check_run(world, run: str, num_rollout: int) -> None:
    """Every push but the first is a delta, is smaller than the model, and was found equal in the engine."""
    sent, whole = (series(world, run, f"perf/update_weights_{what}") for what in ("wire_bytes", "bytes"))
    density = series(world, run, "perf/update_weights_density")
    assert len(series(world, run, "rollout/raw_reward")) == num_rollout
    assert max(density) == max(sent) and len(density) >= num_rollout - 1
    assert all(0 < value <= 1 for value in density.values())
    assert all(sent[step] < whole[step] for step in density)
    assert sum(series(world, run, "perf/engines_evicted").values()) == 0


# Notes what it was called with, what lay there, and what the engine held meanwhile.
POST_WRITE = """
import json, os, urllib.request
from pathlib import Path
import torch.distributed as dist


def note(args, version_dir, rollout_engines):
    held = json.load(urllib.request.urlopen(rollout_engines[0] + "/model_info"))["weight_version"]
    files = sorted(os.listdir(version_dir))
    row = {"rank": dist.get_rank(), "folder": version_dir, "held": held, "files": files}
    with open(Path(args.run_dir).parent / f"noted-{dist.get_rank()}.jsonl", "a") as out:
        out.write(json.dumps(row) + "\\n")


def refuse(args, version_dir, rollout_engines):
    raise OSError("the bucket is gone")
"""


def notes(world, rank: int) -> list[dict]:
    return [json.loads(line) for line in (world / f"noted-{rank}.jsonl").read_text().splitlines()]


def test_a_run_pushes_deltas_and_leaves_nothing(world):
    """With every tensor of the engine compared after every
    push, and a function of the user's before each is read.
    """
    (world / "post_write.py").write_text(POST_WRITE)
    run_train(
        world,
        "run",
        num_rollout=2,
        update_weight_mode="delta",
        check_weight_update_equal=True,
        custom_update_weight_post_write_path=f"{world}/post_write.py:note",
    )
    check_run(world, "run", 2)
    first, *versions = notes(world, 0)
    assert first["folder"] == str(world / "run" / "weights")  # what the run takes over
    pushed, beside = versions[:3], versions[3:]
    assert [Path(row["folder"]).name.split("-")[0] for row in pushed] == ["full", "delta", "delta"]
    # Not yet the one in the folder.
    assert [row["held"].rpartition(":")[2] for row in pushed] == ["default", "1", "2"]
    # A run that takes its time gets a full copy beside training, since the deltas are larger together.
    assert all(Path(row["folder"]).name.startswith("full-") for row in beside)
    assert all("weights.json" in row["files"] for row in versions)
    assert not (world / "run" / "local-weights").exists() and not list((world / "run" / "weights").iterdir())


@pytest.mark.slow
def test_a_run_with_deltas_is_the_run_with_whole_weights(world):
    shared = {"num_rollout": 3, "deterministic_mode": True}
    run_train(world, "delta", update_weight_mode="delta", **shared)
    run_train(world, "full", **shared)
    for name in ("train/loss", "train/grad_norm", "rollout/raw_reward"):
        assert series(world, "delta", name) == series(world, "full", name)


@pytest.mark.slow
def test_every_rank_hears_of_a_checkpoint_before_engines_read_it_and_a_refusal_ends_the_run(world):
    (world / "post_write.py").write_text(POST_WRITE)
    shared = {"num_rollout": 1, "update_weight_transport": "disk", "update_weight_disk_dir": world / "shared"}
    shared |= {"actor_num_gpus_per_node": 2}
    run_train(world, "run", custom_update_weight_post_write_path=f"{world}/post_write.py:note", **shared)
    for rank in (0, 1):
        assert [row["rank"] for row in notes(world, rank)] == [rank] * 2
        assert [row["held"].rpartition(":")[2] for row in notes(world, rank)] == ["default", "1"]
        assert all("model.safetensors.index.json" in row["files"] for row in notes(world, rank))
    done = run_train(
        world,
        "no",
        check=False,
        custom_update_weight_post_write_path=f"{world}/post_write.py:refuse",
        **shared,
    )
    assert done.returncode == 1
    assert "--custom-update-weight-post-write-path raised on rank" in done.stderr
    assert "the bucket is gone" in done.stderr


@contextlib.contextmanager
def running(words: list[str], **options):
    """A child process that is ended whatever happens."""
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, text=True, **options)
    try:
        yield process
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_engine_that_somebody_else_runs_gets_deltas_through_its_agent(world):
    published, read_write = world / "published", os.pipe()
    engine = [
        "slime.engines.embedded",
        "--model-path",
        str(world / "model"),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    engine += ["--ready-file", str(world / "ready"), "--life-fd", str(read_write[0]), "--device", "cpu"]
    engine += ["--dtype", "float32", "--threads", "1", "--shm-prefix", "external"]
    with running(engine, pass_fds=[read_write[0]]) as process:
        while not (world / "ready").exists():
            assert process.poll() is None
            time.sleep(0.1)
        address = f"127.0.0.1:{json.loads((world / 'ready').read_text())['port']}"
        agent = ["slime", "weight-agent", "--engine", address, "--source", str(published), "--port", "0"]
        agent += ["--local-checkpoint-dir", str(world / "copy")]
        with running(agent, stdout=subprocess.PIPE) as asked:
            agent_address = asked.stdout.readline().split("//")[-1].strip()
            run_train(
                world,
                "run",
                num_rollout=2,
                rollout_external_engine_addrs=[address],
                weight_agent_addrs=[agent_address],
                update_weight_mode="delta",
                update_weight_disk_dir=published,
                check_weight_update_equal=True,
            )
    check_run(world, "run", 2)
    state = json.loads((world / "copy" / "state.json").read_text())
    assert state["version"].endswith(f":{len(series(world, 'run', 'rollout/weight_version'))}")
    assert not (world / "run" / "local-weights").exists()
    os.close(read_write[1])


@pytest.mark.sglang
def test_sglang_loads_deltas_without_a_patch(world):
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    run_train(
        world,
        "run",
        timeout=1200,
        num_rollout=2,
        rollout_engine="sglang",
        timeouts="engine-start=900",
        update_weight_mode="delta",
        update_weight_delta_encoding="overwrite",
        weight_checksum_interval=1,
    )
    check_run(world, "run", 2)
