"""The tests of real SGLang servers once more on a GPU, which trainer ranks share; pushes use NCCL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_under_test import sglang_python

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
FILES = [f"contracts/test_{name}.py" for name in ("sglang_fleet", "sglang_first_push", "sglang_two_parts")]
FILES += ["contracts/test_sglang_pd.py", "contracts/test_engine_joins.py"]
FILES += ["contracts/test_sglang_deterministic.py"]
FILES += [f"contracts/test_engine_{name}.py" for name in ("conformance", "control")]
FILES += ["weight_sync/test_adapter_push.py"]


@pytest.mark.parametrize("file", FILES)
def test_it_holds_on_a_gpu_too(file):
    sglang_python()
    command = [sys.executable, "-m", "pytest", "-q", "--tb", "short", "-m", "not gpu", str(TESTS / file)]
    env = {**os.environ, "SLIME_TEST_DEVICE": "cuda"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
