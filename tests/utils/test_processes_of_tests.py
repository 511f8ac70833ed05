"""What tests start ends with them: `run_script` of processes.py."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import LONG_S, eventually, longer_each_time
from processes import run_script

# A step that outlives a parent that dies, and a line behind it.
SCRIPT = 'sleep 1000 & echo $$ $! > "$1"; wait; echo on >> "$1"'


def pids(file):
    return eventually(lambda: file.exists() and file.read_text().split(), LONG_S)


def have_ended(numbers):
    eventually(lambda: not any(psutil.pid_exists(int(number)) for number in numbers), LONG_S)


def test_a_script_ends_with_its_code_and_its_output(tmp_path):
    with open(tmp_path / "out", "w") as out:
        assert run_script(["sh", "-c", "echo told; exit 3"], LONG_S, stdout=out) == 3
    assert (tmp_path / "out").read_text() == "told\n"


def test_a_script_that_is_late_ends_whole(tmp_path):
    file = tmp_path / "pids"
    for seconds in longer_each_time(1.0):
        with pytest.raises(subprocess.TimeoutExpired):
            run_script(["sh", "-c", SCRIPT, "sh", file], seconds)
        if file.exists():
            break
    have_ended(pids(file))


def test_a_script_ends_with_a_test_that_is_killed(tmp_path):
    file = tmp_path / "pids"
    code = f"from processes import run_script; run_script({['sh', '-c', SCRIPT, 'sh', str(file)]})"
    test = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1] / "support")
    numbers = pids(file)
    test.kill()
    test.wait()
    have_ended(numbers)
    assert "on" not in file.read_text()
