"""`slime sweep`: all combinations run, a sweep that was killed continues, and a table compares them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loop_helpers import wait_for
from tiny_model import make_tiny_model

from slime.cli import sweep
from slime.cli.main import main
from slime.utils.files.run_file import has_ended_well, read_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TASK = ("--", "sft", "--model", "model", "--data", "rows.jsonl", "--trainer-threads", "1", "--quiet")


def test_a_killed_sweep_continues_and_compares(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    words = ["sweep", "--set", "lr=1e-2,1e-3", "--seeds", "2", "--out", "out", *TASK]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open("log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slime", *words], stdout=log, stderr=log, env=env, start_new_session=True
        )
    first, second = Path("out/lr=1e-2,seed=1"), Path("out/lr=1e-2,seed=2")
    wait_for(lambda: read_run(second) is not None, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert has_ended_well(first) and not has_ended_well(second)
    before = read_run(first)
    assert main(words) == 0
    assert read_run(first) == before
    names = sorted(path.name for path in Path("out").iterdir())
    assert names == [f"lr={lr},seed={seed}" for lr in ("1e-2", "1e-3") for seed in (1, 2)]
    assert all(has_ended_well(Path("out") / name) for name in names)
    out = capsys.readouterr().out
    assert "skipped: finished already" in out
    table = [line.split() for line in out.splitlines() if line.startswith(("run ", "lr="))]
    assert table[0] == ["run", "finished", "train/loss"] and table[1][:4] == ["lr=1e-2", "2", "of", "2"]
    assert table[1][5] == "±"
    assert main(["plot", *(f"out/{name}" for name in names), "-m", "train/loss"]) == 0
    assert "out/lr=1e-2 (2 seeds)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--set", "lrr=1", *TASK), "no flag 'lrr'; did you mean lr?"),
        (("--set", "lr", *TASK), "write NAME=VALUE,VALUE"),
        (("--set", "lr=1,", *TASK), "write NAME=VALUE,VALUE"),
        (("--set", "lr=1e-3,x", *TASK), "--lr is 'x'"),
        (("--set", "model=model,./gone/x", *TASK), "--model is ./gone/x: there is no such folder"),
        (("--set", "rollout-shuffle=yes", *TASK), "it is a switch; use true or false"),
        (("--set", "run-dir=a", *TASK), "it cannot be swept over"),
        (("--set", "lr=1,1", *TASK), "the same folder"),
        (("--seeds", "0", *TASK), "--seeds"),
        (("--set", "lr=1,2", *TASK, "--save", "old", "--load", "old"), "would continue the same checkpoint"),
        (("--set", "lr=1"), "nothing to run"),
        (("--", "plot", "x"), "a command that starts no run"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(world, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(world)
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--out", "none", *words])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err
    assert not Path("none").exists()


def test_the_settings_of_a_new_task_are_swept_over(world, monkeypatch, capsys):
    """Its checkpoints are below the folder of each run, so no two runs continue the same one."""
    monkeypatch.chdir(world)
    assert main(["new", "mytask"]) == 0
    started = []
    monkeypatch.setattr(sweep, "_run", lambda command, words: started.append(words) or 0)
    main(["sweep", "--set", "lr=1e-3,1e-2", "--out", "tasks", "--", "--config", "mytask/run.yaml"])
    assert len(started) == 2, capsys.readouterr().err
