"""`slime dashboard` as a user starts it: a demo, a mistake, beside a run; and what smooths its curves."""

import json
import os
import re
import stat
import subprocess
import sys
import urllib.request

import numpy as np
import psutil
import pytest
from page_world import make_run
from patience import eventually
from processes import cmdline

from slime.cli.inspect.dashboard import kept_address
from slime.cli.inspect.page_process import page_beside
from slime.cli.main import main
from slime.dashboard.curves import moving_average
from slime.utils.files.folder_lock import FolderLock


def answer(address, path):
    with urllib.request.urlopen(address.partition("#")[0] + path, timeout=60) as response:
        return json.loads(response.read())


def test_the_demo_is_a_whole_run(tmp_path):
    command = [sys.executable, "-m", "slime", "dashboard", "--demo", "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            listed = answer(address, "api/runs")
            [run] = listed["runs"]
            assert run["key"] == "demo" and run["state"] == "finished" and not listed["may_act"]
            lanes = {lane["name"] for lane in answer(address, "api/runs/demo/timeline?step=3")["lanes"]}
            assert {"loop", "engine-0", "engine-1", "reward", "trainer-0", "push"} <= lanes
            [row] = answer(address, "api/runs/demo/samples?kind=train&step=13&limit=1")["rows"]
            found = answer(address, f"api/runs/demo/samples/{row['id']}")
            assert found["advantage"] and found["log_probs"] and found["texts"]
        finally:
            process.terminate()


@pytest.mark.parametrize("words", [[], ["nothing/here"]])
def test_a_folder_that_is_no_run_is_a_clear_error(words, capsys):
    assert main(["dashboard", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_dashboard_of_a_run_prints_its_address_without_the_token_and_ends_with_the_run(tmp_path, capfd):
    """The run's terminal and driver.log get this text; the token is in a file that only the user can read."""
    make_run(tmp_path / "run", 2, exit=None)
    lock = FolderLock(tmp_path / "run", "--run-dir")
    file = tmp_path / "run" / "dashboard_address"
    try:
        with page_beside(str(tmp_path / "run")):
            text = eventually(lambda: (out := capfd.readouterr().out) and "http" in out and out)
            address = re.search(r"http://[^ ]+", text)[0]
            assert answer(address, "api/runs")["runs"][0]["state"] == "running"
            assert str(file) in text and stat.S_IMODE(file.stat().st_mode) == 0o600
            shown, _, token = file.read_text().strip().partition("#token=")
            assert shown == address and len(token) > 16
            assert token not in text and token not in "".join(
                path.read_text(errors="replace")
                for path in tmp_path.rglob("*")
                if path.is_file() and path != file
            )
            sent = urllib.request.Request(f"{address}api/runs/{tmp_path.name}/actions", b'{"name": "pause"}')
            sent.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(sent, timeout=60) as response:
                assert json.loads(response.read())["id"] > 0
        with pytest.raises(OSError):
            answer(address, "api/runs")
        assert not file.exists()
    finally:
        lock.release()


def test_the_token_of_a_run_that_others_own_is_kept_in_a_folder_of_the_user(tmp_path):
    (tmp_path / "run").write_text("")  # a folder in which nothing can be written, for root as well
    with kept_address(tmp_path / "run", "http://127.0.0.1:1/#token=x") as file:
        assert tmp_path not in file.parents and file.read_text() == "http://127.0.0.1:1/#token=x\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.exists()


def test_a_page_that_dies_before_its_run_is_told_of(tmp_path, capfd):
    make_run(tmp_path / "run", 2, exit=None)
    lock = FolderLock(tmp_path / "run", "--run-dir")
    try:
        with page_beside(str(tmp_path / "run")):
            eventually(lambda: "http" in capfd.readouterr().out)
            [page] = [p for p in psutil.Process().children() if str(tmp_path / "run") in cmdline(p)]
            page.kill()
            eventually(lambda: "was killed by signal 9; the run continues" in capfd.readouterr().out)
    finally:
        lock.release()


def test_ctrl_c_is_for_the_run_and_a_page_that_is_not_up_yet_says_nothing(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt), page_beside(str(tmp_path / "run")):
        # A process that is forked for a test has its command line a moment later than its pid.
        [page] = eventually(
            lambda: [p for p in psutil.Process().children() if str(tmp_path / "run") in cmdline(p)]
        )
        assert os.getsid(page.pid) == page.pid  # else the terminal would interrupt its imports too
        raise KeyboardInterrupt
    assert not page.is_running() and capfd.readouterr().out == ""


@pytest.mark.parametrize("weight", [0.3, 0.9, 0.999])
def test_smoothing_is_the_plain_recurrence(weight):
    values = np.random.default_rng(0).normal(size=3000)
    values[[5, 700]] = np.nan
    mean, norm, expected = 0.0, 0.0, []
    for value in values:
        if np.isfinite(value):
            mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        else:
            mean, norm = weight * mean, weight * norm
        expected.append(mean / norm)
    np.testing.assert_allclose(moving_average(values, weight), expected, rtol=1e-9, atol=1e-12)
