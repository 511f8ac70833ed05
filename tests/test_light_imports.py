"""What runs without a model imports no torch: a router, a help text or a test of flags starts at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HEAVY = ("torch", "transformers", "ray")
LIGHT = (
    "slime",
    "slime.arguments",
    "slime.catalog.estimators",
    "slime.cli.main",
    "slime.cli.quickstart.command",
    "slime.data.dataset",
    "slime.engines.fleet",
    "slime.engines.balancer",
    "slime.engines.engine_process",
    "slime.observability.rollout_metrics",
    "slime.plugins",
    "slime.rollout.fully_async_rollout",
    "slime.rollout.rm_hub.hub",
    "slime.rollout.sglang_rollout",
    "slime.runtime.worker_main",
    "slime.utils.types",
    "slime.wire.client",
    "slime.wire.control",
)
# Imported when tests are collected; what a test does with them may need more.
HELPERS = (
    "tests.conftest",
    "argument_helpers",
    "fake_engine",
    "loop_helpers",
    "rollout_helpers",
    "tiny_model",
)
# In one process: modules share most of what they import, so the first that brings a heavy one is the culprit.
LOOK = """
import importlib, sys
heavy, light = (words.split(",") for words in sys.argv[1:])
for module in light:
    importlib.import_module(module)
    for found in heavy:
        if found in sys.modules:
            sys.exit(f"{module} imports {found}")
"""


@pytest.mark.parametrize("modules", [LIGHT, HELPERS], ids=["slime", "helpers of tests"])
def test_what_runs_without_a_model_imports_no_torch(modules):
    done = subprocess.run(
        [sys.executable, "-c", LOOK, ",".join(HEAVY), ",".join(modules)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "support")])},
    )
    assert done.returncode == 0, done.stderr
