"""The examples with tools, run as their READMEs say: they learn. Each takes minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Held-out reward that is far above the start and below what was seen.
LEARNT = {"retool": (0.55, 0.70)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNT)
def test_the_example_learns(name, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path)}
    subprocess.run([ROOT / "examples" / name / "run.sh"], env=environment, check=True)
    rows = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    values = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
    most_before, least_after = LEARNT[name]
    assert values[0] < most_before
    assert values[-1] > least_after
