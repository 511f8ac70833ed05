"""The tests of layouts and of weight pushes once more, with NCCL: their ranks share one GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parent
FSDP = [f"test_fsdp_{name}.py" for name in ("ranks", "parallel", "experts", "adapter_ranks", "loading")]
MEGATRON = [f"megatron/test_megatron_{name}.py" for name in ("layouts", "checkpoint", "experts", "agreement")]
PUSHES = [f"../weight_sync/test_{name}.py" for name in ("broken_broadcast", "stage_groups")]


@pytest.mark.parametrize("file", [*FSDP, *MEGATRON, *PUSHES])
def test_it_holds_with_nccl_too(file):
    if file in MEGATRON:
        pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "pytest", "-q", "--tb", "short", "-m", "not gpu", str(FOLDER / file)]
    ended = subprocess.run(
        command, env={**os.environ, "SLIME_TEST_DEVICE": "cuda"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
