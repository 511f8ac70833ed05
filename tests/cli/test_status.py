"""`slime status` and `slime watch`: what a folder says of its run, going on, ended or killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import PATIENCE_S

from slime.cli.inspect import status
from slime.cli.main import main
from slime.liveness.wait_table import WaitRow, write_table
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.run_file import close_run_file, open_run_file


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "my-run"
    folder.mkdir()
    open_run_file(
        folder, {"num_rollout": {"value": 10, "source": "command line"}}, str(tmp_path / "c"), None, None
    )
    return folder


def log(folder, step, **metrics):
    row = {"time": 1.7e9, "step": step, "rollout/num_samples": 4, "rollout/raw_reward": 0.25, **metrics}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_run_that_has_logged_nothing(run_dir, capsys):
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("my-run (")
        and "lost: the process ended without a word" in out
        and "no step yet" in out
    )


def test_a_running_one_shows_where_it_is_and_how_long_it_takes(run_dir, capsys):
    lock = FolderLock(run_dir, "--run-dir")
    log(run_dir, 3, **{"perf/step_time": 60.0, "eval/held": 0.5, "eval/held-truncated_ratio": 0.0})
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": running" in out and "step 4/10, about 0:06:00 left" in out and "reward 0.25" in out
    assert "eval/held 0.5\n" in out and "truncated" not in out and "checkpoints in" in out
    lock.release()


@pytest.mark.parametrize(
    "error, words", [(None, "finished"), (ValueError("bad \x1b[2J"), "ValueError: bad ␛[2J")]
)
def test_how_it_ended(run_dir, capsys, error, words):
    log(run_dir, 9)
    close_run_file(run_dir, error)
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert words in out and "step 10/10" in out and "left" not in out


def test_a_run_that_ends_during_a_look_is_not_lost(run_dir, capsys, monkeypatch):
    lock, read = FolderLock(run_dir, "--run-dir"), status.need_run

    def read_and_end(folder):
        record = read(folder)
        close_run_file(run_dir, None)
        lock.release()
        return record

    with monkeypatch.context() as during:
        during.setattr(status, "need_run", read_and_end)
        main(["status", str(run_dir)])
    main(["status", str(run_dir)])
    out = capsys.readouterr().out
    assert ": running" in out and ": finished" in out and "lost" not in out


def test_watching_ends_with_the_run(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(status, "_EVERY_S", 0.01)
    lock = FolderLock(run_dir, "--run-dir")
    log(run_dir, 0)
    watcher = threading.Thread(target=main, args=(["watch", str(run_dir)],))
    watcher.start()
    log(run_dir, 1)
    close_run_file(run_dir, None)
    lock.release()
    watcher.join(60)
    assert not watcher.is_alive()
    assert "finished" in capsys.readouterr().out


def test_a_driver_that_is_stopped_is_told(run_dir, capsys):
    hold = "import sys, time; from pathlib import Path; from slime.utils.files import folder_lock; "
    hold += "lock = folder_lock.FolderLock(Path(sys.argv[1]), '--run-dir'); print('held', flush=True); "
    hold += "time.sleep(600)"
    driver = subprocess.Popen([sys.executable, "-c", hold, str(run_dir)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout.readline() == b"held\n"
        main(["status", str(run_dir)])
        assert "is stopped" not in capsys.readouterr().out
        driver.send_signal(signal.SIGSTOP)
        os.waitpid(driver.pid, os.WUNTRACED)
        main(["status", str(run_dir)])
        assert f"(process {driver.pid}) is stopped (SIGSTOP)" in capsys.readouterr().out
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("command", ["status", "watch"])
def test_a_folder_of_no_run_is_one_line(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_is_paused_says_so_and_for_how_long(run_dir, capsys):
    lock, now = FolderLock(run_dir, "--run-dir"), time.time()
    write_table(run_dir, [WaitRow("run", "paused", "", now - 95, None)])
    log(run_dir, 1)
    assert main(["status", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": paused") and "so far" in lines[1]
    [paused] = re.findall(r"paused, for (\d+) s", "\n".join(lines))
    assert 95 <= int(paused) < 95 + PATIENCE_S
    assert main(["status", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "paused"
    lock.release()


def test_waits_are_shown_overdue_first_and_as_json(run_dir, capsys):
    lock, now = FolderLock(run_dir, "--run-dir"), time.time()
    rows = [
        WaitRow("run", "training", "", now - 40, None),
        WaitRow("driver", "POST /pause", "engine-0", now - 30, 10.0),
    ]
    write_table(run_dir, rows)
    log(run_dir, 1)
    assert main(["status", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines[lines.index("  waits:") + 1 :]
    assert re.match(r" *driver waits for engine-0: POST /pause, for \d+ s.* OVERDUE$", shown[0])
    assert re.match(r" *run waits: training, for \d+ s$", shown[1])
    assert main(["status", str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "running" and told["metrics"]["rollout/raw_reward"] == 0.25
    assert [row["overdue"] for row in told["waits"]] == [True, False]
    close_run_file(run_dir, None)
    lock.release()
    main(["status", str(run_dir)])
    assert "waits:" not in capsys.readouterr().out


def test_a_folder_without_access_is_named_without_a_traceback(tmp_path, capsys, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("slime.cli.inspect.status.need_run", refuse)
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Permission denied; ask for access to it.\n"
