"""Runs on two hosts, each with its own address, /tmp and /dev/shm: with a shared folder, and without."""

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
from loop_helpers import flags, make_world, metrics
from network_hosts import ROOT, environment, network_hosts, ray_on
from patience import eventually

from slime.utils.files.step_folders import by_content, find_step

pytestmark = pytest.mark.hosts

SIZES = {"rollout_num_gpus": 2, "actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "runtime": "ray"}


def relative_flags(world: Path, run: str, **changes) -> list[str]:
    """The command line as a user types it in the folder above the task."""
    return [word.replace(f"{world.parent}/", "") for word in flags(world, run, **SIZES, **changes)]


def test_hosts_without_shared_folders_or_with_other_packages_are_named_before_the_start():
    with network_hosts(2) as hosts, ray_on(hosts) as address:
        [installed] = [file for file in files("transformers") if file.name == "METADATA"]
        path = str(installed.locate())
        another = (
            f"sed 's/^Version: .*/Version: 4.0.0/' {path} > /tmp/other && mount --bind /tmp/other {path}"
        )
        assert hosts[1].run("sh", "-c", another).returncode == 0
        for host in hosts:  # a copy on each host: enough for what is only read
            code = "import sys; sys.path.insert(0, sys.argv[1]); import loop_helpers, pathlib; "
            code += "p = pathlib.Path('/tmp/a/task'); p.mkdir(parents=True); loop_helpers.make_world(p)"
            made = host.run(sys.executable, "-c", code, str(ROOT / "tests" / "support"), **environment())
            assert made.returncode == 0, made.stdout
        words = relative_flags(Path("/tmp/a/task"), "run", save="task/ckpt", num_rollout=1)
        train = (sys.executable, str(ROOT / "train.py"), *words)
        doctor = (sys.executable, "-m", "slime", "doctor", "--hosts", *words)
        looked = hosts[0].run(*doctor, cwd="/tmp/a", RAY_ADDRESS=address, **environment())
        done = hosts[0].run(*train, cwd="/tmp/a", RAY_ADDRESS=address, **environment())
        for seen in (looked, done):
            assert seen.returncode not in (0, 124), seen.stdout
            odd = f"Host host1 ({hosts[1].address}): version of transformers: 4.0.0, and host0 "
            assert odd in seen.stdout, seen.stdout
            assert f"Host host1 ({hosts[1].address}) does not see all files" in seen.stdout, seen.stdout
        assert f"  host0 ({hosts[0].address}): no GPU; eth0, " in looked.stdout, looked.stdout
        assert f"Host host1 ({hosts[1].address}) does not see all files of this run:" in done.stdout
        assert "\n  --run-dir: /tmp/a/task/run: " in done.stdout
        assert "\n  --save: /tmp/a/task/ckpt: " in done.stdout
        assert "--hf-checkpoint" not in done.stdout.partition("Host host1")[2]


def test_a_shared_folder_is_enough_and_a_lost_engine_of_another_host_is_reported(tmp_path):
    world = tmp_path / "task"
    world.mkdir()
    make_world(world)
    with network_hosts(2, shared=tmp_path) as hosts, ray_on(hosts) as address:
        words = relative_flags(world, "run", save="task/ckpt", num_rollout=60)
        env = [f"{name}={value}" for name, value in {**environment(), "RAY_ADDRESS": address}.items()]
        line = hosts[0].command("env", "-C", str(tmp_path), *env, sys.executable, str(ROOT / "train.py"))
        with open(tmp_path / "out", "w") as out:
            process = subprocess.Popen([*line, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        eventually(lambda: "step 2/" in (tmp_path / "out").read_text() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "out").read_text()[-6000:]
        killed = hosts[1].run("pkill", "-9", "-f", "slime.engines.embedded")
        assert killed.returncode == 0, "there was no engine on the second host"
        code = process.wait()
        shown = (tmp_path / "out").read_text()
        assert code == 0, shown[-6000:]
        status = hosts[0].run(sys.executable, "-m", "slime", "status", str(world / "run"), **environment())
        for where in (shown, (world / "run/logs/driver.log").read_text(), status.stdout):
            assert "engine-1 was killed by signal 9" in where
    step = find_step(world / "ckpt")
    assert step is not None and by_content(step) == []
    assert {"trainer/__0_0.distcp", "trainer/__1_0.distcp"} <= set(step.manifest.files)


def test_an_engine_that_runs_on_another_host_gets_weights_by_a_process_group(tmp_path):
    """Everything else is on the first host, and would meet on loopback."""
    world = tmp_path / "task"
    world.mkdir()
    make_world(world)
    env = {**environment(), "SLIME_ENGINE_TOKEN": "secret"}
    with network_hosts(2, shared=tmp_path) as hosts:
        serve = (sys.executable, "-m", "slime.engines.embedded", "--model-path", str(world / "model"))
        serve += ("--host", hosts[1].address, "--port", "30000", "--threads", "1", "--device", "cpu")
        words = [f"{name}={value}" for name, value in env.items()]
        line = hosts[1].command("env", *words, *serve, "--ready-file", str(tmp_path / "ready"))
        engine = subprocess.Popen(line, stdin=subprocess.DEVNULL)
        eventually(lambda: (tmp_path / "ready").exists() or engine.poll() is not None)
        changes = {"rollout_external_engine_addrs": f"{hosts[1].address}:30000", "num_rollout": 2}
        train = flags(world, "run", **changes, update_weight_transport="distributed")
        done = hosts[0].run(sys.executable, str(ROOT / "train.py"), *train, cwd=str(tmp_path), **env)
        engine.kill()
        engine.wait()
    assert done.returncode == 0, done.stdout[-6000:]
    assert "by the transport distributed" in done.stdout
    missed = [row["perf/engines_missed"] for row in metrics(world, "run") if "perf/engines_missed" in row]
    assert missed and not any(missed), done.stdout[-6000:]


@pytest.mark.parametrize("version", [4, 6])
def test_hosts_with_several_networks_and_a_name_on_loopback_meet_at_the_addresses_of_the_scheduler(
    tmp_path, version
):
    world = tmp_path / "task"
    world.mkdir()
    make_world(world)
    with network_hosts(2, shared=tmp_path, version=version, misnamed=True) as hosts, ray_on(hosts) as address:
        words = relative_flags(world, "run", num_rollout=2, update_weight_transport="distributed")
        env = {"RAY_ADDRESS": address, **environment()}
        wrong = ("--train-env-vars", '{"GLOO_SOCKET_IFNAME": "ib0"}')
        doctor = (sys.executable, "-m", "slime", "doctor", "--hosts", *words, *wrong)
        looked = hosts[0].run(*doctor, cwd=str(tmp_path), **env)
        for host in hosts:
            name = f"{host.name} ({host.address}): "
            assert f"{name}no GPU; ib0 (NCCL: =eth0), " in looked.stdout, looked.stdout
            assert f"{name}GLOO_SOCKET_IFNAME=ib0: this host has no such" in looked.stdout, looked.stdout
        assert looked.returncode not in (0, 124), looked.stdout
        done = hosts[0].run(sys.executable, str(ROOT / "train.py"), *words, cwd=str(tmp_path), **env)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "by the transport distributed" in done.stdout
    missed = [row["perf/engines_missed"] for row in metrics(world, "run") if "perf/engines_missed" in row]
    assert missed and not any(missed), done.stdout[-6000:]
