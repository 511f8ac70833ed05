"""Functions of the user's that end the run's processes or close its files are named, and do no harm."""

import os
import signal
import subprocess
import sys

import pytest
from patience import PATIENCE_S

from slime.liveness import waits
from slime.utils.machine.children import protect, stop_process
from slime.utils.plugin_errors import PluginError

CLOSES = """
import os, sys
from pathlib import Path
from slime.utils.machine import descriptors
from slime.utils.plugin_errors import plugin_call

with descriptors.watching(Path(sys.argv[1])):
    with plugin_call("--custom-rm-path", "mine.py:harmless"):
        os.close(os.open(os.devnull, os.O_RDONLY))
    print("still here", flush=True)
    with plugin_call("--custom-rm-path", "mine.py:closes_all"):
        os.closerange(3, 200)
    print("never here", flush=True)
"""


def test_a_function_that_closes_the_descriptors_of_the_run_is_named(tmp_path):
    error_file = tmp_path / "error.txt"
    done = subprocess.run([sys.executable, "-c", CLOSES, error_file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "still here\n")
    assert done.stderr.startswith("error: --custom-rm-path mine.py:closes_all closed file descriptors")
    assert error_file.read_text() == done.stderr


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_function_that_slime_calls_cannot_end_a_process_of_the_run(kill):
    child = protect(subprocess.Popen(["sleep", "600"], process_group=0))
    others = subprocess.Popen(["sleep", "600"], process_group=0)

    def ends(process):
        return lambda: kill(process.pid, signal.SIGKILL) is None

    try:
        with pytest.raises(PluginError, match=rf"own_things.py:\d+ in .* signal 9 to process {child.pid}"):
            waits.until(ends(child), "a function of the user's", PATIENCE_S)
        assert child.poll() is None
        waits.until(ends(others), "one that it started itself", PATIENCE_S)
        assert others.wait(PATIENCE_S) == -signal.SIGKILL
        stop_process(child, grace_s=0.0)  # slime's own code may
        assert child.wait(PATIENCE_S) < 0
    finally:
        for process in (child, others):
            if process.poll() is None:
                process.kill()
