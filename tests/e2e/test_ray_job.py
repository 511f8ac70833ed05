"""`ray job submit -- python3 train.py ...`, as users of Ray clusters start a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loop_helpers import ROOT, flags, make_world, metrics
from patience import PATIENCE_S, eventually

from slime.utils.machine.ports import find_available_port

pytestmark = pytest.mark.slow

RAY = (sys.executable, "-m", "ray.scripts.scripts")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address for jobs of a cluster of one node; its workers start in this repository, as in the docs."""
    pytest.importorskip("ray")
    pytest.importorskip("aiohttp_cors", reason="jobs need ray[default]")
    port, dashboard = find_available_port(20000), find_available_port(30000)
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    where = ("--port", str(port), "--dashboard-port", str(dashboard), "--num-cpus", "2")
    start = (*RAY, "start", "--head", "--block", "--disable-usage-stats", *where)
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with open(log, "w") as out:
        head = subprocess.Popen(
            start, cwd=ROOT, env={**env, "PATH": path}, stdout=out, stderr=out, start_new_session=True
        )
    address = f"http://127.0.0.1:{dashboard}"
    eventually(lambda: submit(address, "true").returncode == 0)  # jobs are taken later than Ray is up
    yield address
    subprocess.run((*RAY, "stop", "--force"), env=env, capture_output=True, timeout=PATIENCE_S)
    head.wait(PATIENCE_S)


def submit(cluster: str, *words: str, **runtime_env: object) -> subprocess.CompletedProcess:
    line = (*RAY, "job", "submit", f"--address={cluster}", f"--runtime-env-json={json.dumps(runtime_env)}")
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*line, "--", *words], env=env, timeout=2 * PATIENCE_S, **kinds)


def test_a_job_shows_the_log_of_its_run_and_has_its_exit_code(cluster, tmp_path):
    world = make_world(tmp_path)
    env_vars = {"OMP_NUM_THREADS": "1"}
    train = ("python3", "train.py")
    done = submit(cluster, *train, *flags(world, "run", num_rollout=2), env_vars=env_vars)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stdout[-6000:]
    settings = json.loads((world / "run/run.json").read_text())
    assert "ray" in json.dumps(settings), "a job runs on the cluster that it was submitted to"
    assert len([row for row in metrics(world, "run") if "train/loss" in row]) == 2
    done = submit(cluster, *train, *flags(world, "other", lr="fast"), env_vars=env_vars)
    assert done.returncode == 1 and "--lr" in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_a_run_folder_in_the_folder_of_the_job_is_refused(cluster, tmp_path):
    world = make_world(tmp_path / "world")
    (tmp_path / "code").mkdir()
    shutil.copy(ROOT / "train.py", tmp_path / "code")
    words = flags(world, "run", num_rollout=2, run_dir=None)
    done = submit(cluster, "python3", "train.py", *words, working_dir=str(tmp_path / "code"))
    assert done.returncode == 1 and "--run-dir" in done.stdout, done.stdout[-6000:]
    assert "is removed with this job: give an absolute path" in done.stdout
