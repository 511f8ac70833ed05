"""One SGLang server over two hosts, a rank on each: placed, pushed to and restarted as one engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_helpers import flags, make_world, series
from network_hosts import ROOT, environment, network_hosts, ray_on
from patience import eventually
from tiny_model import make_tiny_model

from slime.arguments.passthrough.sglang_flags import find_python

pytestmark = [pytest.mark.hosts, pytest.mark.sglang]

ENGINE = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "num_gpus_per_node": 1}
LONG_S = 3600.0  # a server of two ranks starts three times
PATIENT = ("engine-start", "no-engine", "host", "engine-silence", "worker-silence", "update-weight")
ENGINE |= {"runtime": "ray", "rollout_engine": "sglang"}
ENGINE |= {"timeouts": ",".join(f"{name}={LONG_S:g}" for name in PATIENT)}


def start(hosts, address: str, folder: Path, **changes) -> subprocess.Popen:
    """Start a run on the first host; its output goes to `run.out`."""
    if (python := find_python(None)) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    words = flags(folder / "task", "run", **ENGINE, sglang_python=python, dtype="float32", **changes)
    env = [f"{name}={value}" for name, value in {**environment(), "RAY_ADDRESS": address}.items()]
    line = hosts[0].command("env", "-C", str(folder), *env, sys.executable, str(ROOT / "train.py"), *words)
    with open(folder / "run.out", "w") as out:
        return subprocess.Popen(line, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "task").mkdir()
    make_world(tmp_path / "task")
    return tmp_path


def test_a_server_of_two_hosts_takes_weights_by_every_transport_and_answers_as_the_model_does(tmp_path):
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    for seed, name in enumerate(("old", "new")):
        make_tiny_model(tmp_path / name, init_std=0.2, seed=seed)
    with network_hosts(2, shared=tmp_path) as hosts:
        met = f"{hosts[0].address}:20111"
        env = [f"{name}={value}" for name, value in environment().items()]
        env += [f"PYTHONPATH={ROOT}:{ROOT / 'tests' / 'support'}"]
        parts = []
        for node, host in enumerate(hosts):
            words = (sys.executable, str(ROOT / "tests/support/part_of_engine.py"), str(node), host.address)
            line = host.command("env", "-C", str(ROOT), *env, *words, met, str(tmp_path))
            with open(tmp_path / f"out-{node}", "w") as out:
                parts.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=out, stderr=out))
        seen = tmp_path / "seen.json"
        eventually(lambda: seen.exists() or any(part.poll() is not None for part in parts), LONG_S)
        shown = [
            (tmp_path / name).read_text()[-3000:] for name in ("out-0", "out-1", "part-0.log", "part-1.log")
        ]
        assert seen.exists(), "\n".join(shown)
        for part in parts:
            part.kill()
            part.wait()
    found = json.loads(seen.read_text())
    assert found.pop("ranks") == found.pop("ranks with checksums") == 2
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_run_with_an_engine_of_two_hosts_survives_the_loss_of_either_part(folder, transport):
    """Ray places the parts; each loss restarts both, and the run goes on with the current weights."""
    out = folder / "run.out"

    def until(words: str, count: int = 1) -> None:
        eventually(lambda: out.read_text().count(words) >= count or run.poll() is not None, LONG_S)
        assert run.poll() is None, out.read_text()[-8000:]

    changes = {"update_weight_disk_dir": folder / "weights"} if transport == "disk" else {}
    with network_hosts(2, shared=folder) as hosts, ray_on(hosts) as address:
        run = start(hosts, address, folder, update_weight_transport=transport, num_rollout=20, **changes)
        for losses, host in enumerate(reversed(hosts), 1):
            until(f"step {losses}/")
            killed = host.run("pkill", "-9", "-f", "run_server.py")
            assert killed.returncode == 0, f"there was no part of the engine on {host.name}"
            until("engine-0 is ready again at", losses)
        code = run.wait()
    shown = out.read_text()
    assert code == 0, shown[-8000:]
    assert shown.count("The engine is being restarted.") == 2
    assert (folder / "task/run/logs/engine-0-node-1.log").exists()
    differences = series(folder / "task", "run", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 20 and max(differences.values()) < 1e-4, differences
