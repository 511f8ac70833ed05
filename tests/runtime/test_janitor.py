"""Shared memory of a run goes with its driver, also when nobody is left to remove it."""

import subprocess
import sys

from patience import eventually

from slime.runtime.janitor import Janitor
from slime.utils.machine import shm

DRIVER = """
import sys, time
from pathlib import Path
from slime.runtime.janitor import Janitor
janitor = Janitor(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
time.sleep(60)
"""


def test_segments_go_when_the_driver_is_killed(tmp_path):
    (tmp_path / "mine-1").touch()
    (tmp_path / "other-1").touch()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), "mine"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout.readline() == "ready\n"
    driver.kill()
    driver.wait()
    eventually(lambda: not (tmp_path / "mine-1").exists())
    assert (tmp_path / "other-1").exists()


def test_a_dismissed_janitor_removes_nothing():
    prefix = shm.make_prefix()
    segment = shm.create_segment(8, prefix)
    Janitor(shm.FOLDER, prefix).dismiss()
    assert shm.list_segments(prefix) == [segment.name]
    segment.unlink()
