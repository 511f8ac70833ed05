"""Commands that were started with some of their standard streams closed, as some job runners do."""

import os
import subprocess
import sys

import pytest

CHECK = """
import os, sys
from slime.utils.machine.open_files import open_missing_streams
open_missing_streams()
print("said"), print("told", file=sys.stderr), sys.stdin.read()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, "what a library writes to its errors would be in this file"
    os.write(2, b"noise of a library")
    file.write("all well")
"""


def run(closed, *words, **options):
    def close():
        for number in closed:
            os.close(number)

    return subprocess.run([sys.executable, *words], preexec_fn=close, timeout=120, **options)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_streams_that_are_closed_lead_nowhere(tmp_path, closed):
    file = tmp_path / "out"
    done = run(closed, "-c", CHECK, str(file), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0 and file.read_text() == "all well"
    assert done.stdout == ("" if 1 in closed else "said\n")
    assert done.stderr == ("" if 2 in closed else "told\nnoise of a library")


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_mistake_ends_with_its_exit_code_when_nobody_can_read_of_it(closed):
    assert run(closed, "-m", "slime", "train", "--config", "nowhere.yaml").returncode == 2
    assert run(closed, "-m", "slime", "--version").returncode == 0
