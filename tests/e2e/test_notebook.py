"""The notebook of the examples runs to its end, and what it trains learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_runs_and_its_reward_rises(tmp_path):
    script, notebook = ROOT / "tests" / "support" / "run_cells.py", ROOT / "examples" / "own_task.ipynb"
    done = subprocess.run(
        [sys.executable, str(script), str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
