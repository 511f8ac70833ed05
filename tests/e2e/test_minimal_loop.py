"""The loop that a newcomer reads first runs as it is, and its reward rises."""

import os
import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_the_minimal_loop_learns():
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "examples/minimal_loop.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "Unclosed" not in done.stderr, done.stdout + done.stderr
    rewards = [float(value) for value in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert len(rewards) == 12 and rewards[-1] > rewards[0] + 0.5
