"""Runs that earlier versions started, and that were killed, resume with the code of today.

The archives in `tests/existing_runs/` hold such runs; `make.py` there says how they were made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loop_helpers import ROOT, series
from patience import PATIENCE_S

from slime.record import RECORD_FILE
from slime.record.audit import audit
from slime.utils.files.run_file import read_run
from tests.existing_runs.make import NUM_ROLLOUT, SAVED, unpack

pytestmark = pytest.mark.timeout(1200)

ARCHIVES = sorted((ROOT / "tests" / "existing_runs").glob("*.tar.gz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def archive(request):
    return request.param


def start(folder: Path, command: dict, *more: str) -> subprocess.CompletedProcess[str]:
    """Start the stored command in its folder, with further flags, and require that it succeeds."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / command["script"]), *command["flags"], *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    return ended


def test_the_same_command_resumes_a_run_of_an_earlier_version(archive, tmp_path):
    command = unpack(archive, tmp_path)
    before = read_run(tmp_path / "run")
    first_steps = {step: value for step, value in rewards(tmp_path, "run").items() if step < SAVED}
    assert len(first_steps) == SAVED and before.last.exit is None

    ended = start(tmp_path, command)

    resumed = read_run(tmp_path / "run")
    assert resumed.id == before.id and resumed.last.exit == "finished"
    assert resumed.last.resumed["rollout"] == SAVED - 1
    assert ("has no digests" in ended.stderr) == (before.last.inputs is None)
    assert resumed.last.inputs, "from now on the files that define the run are compared"
    after = rewards(tmp_path, "run")
    assert sorted(after) == list(range(NUM_ROLLOUT))
    assert {step: after[step] for step in first_steps} == first_steps
    saved = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_0000001", "step_0000003"]
    found = audit(tmp_path / "run" / RECORD_FILE, finished=True, run_id=before.id, saved=(1, 3))
    assert not found.violations and found.steps == list(range(NUM_ROLLOUT))


@pytest.mark.parametrize(
    "archive",
    [pytest.param(path, marks=pytest.mark.slow if "async" in path.name else ()) for path in ARCHIVES],
    ids=lambda path: path.name.removesuffix(".tar.gz"),
    indirect=True,
)
def test_a_new_run_folder_continues_from_a_checkpoint_of_an_earlier_version(archive, tmp_path):
    command = unpack(archive, tmp_path)
    start(tmp_path, command, "--load", "checkpoints", "--save", "more", "--run-dir", "second")
    assert sorted(rewards(tmp_path, "second")) == list(range(SAVED, NUM_ROLLOUT))
    assert read_run(tmp_path / "second").last.exit == "finished"


def rewards(folder: Path, run: str) -> dict[int, float]:
    return series(folder, run, "rollout/raw_reward")
