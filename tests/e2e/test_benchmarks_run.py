"""Every benchmark that needs no finished run still runs, on shapes
that measure nothing: a renamed function must not wait for a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
QUICK = {
    "train_step": "--device cpu --tiny --steps 1 --part balance --part 0.6b --profile",
    "rollout_throughput": "--concurrency 4 --num-prompts 2 --samples-per-prompt 2 --prompt-tokens 16 "
    "--output-tokens 8 --rounds 1",
    "weight_push": "--bucket-mib 1 --pushes 1",
    "record_overhead": "--steps 2",
    "ledger_overhead": "--steps 2",
}
SLOW = {
    "colocated_grpo": "--steps 2 --prompts 2 --output-tokens 8",
    "fp8_training": "--shape tiny --device cpu --steps 8 --sequences 4 --length 32",
    "fp8_drift": "--steps 2 --prompts 2 --output-tokens 8 --cases fp8-start-stochastic",
    "long_tail": "--steps 3 --prompts 2 --median 4 --seeds 1 2 --eval-prompts 2",
    "rollout_overhead": "--sizes 50 --rounds 1 --concurrency 8",
    "rollout_scaling": "--sizes 20 40 --engines 1 3 --concurrency 8",
    "engine_throughput": "--num-requests 4 --max-running 2 --longest 16 --rounds 1",
    "delta_sync": "--shape tiny --tokens 16",
}
# A benchmark that misses its goal, as these shapes may, exits with 1 after it has written its results.
CASES = [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_a_benchmark_writes_its_results(name, flags, tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, f"benchmarks/{name}.py", *flags.split(), "--json", str(results)]
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode in (0, 1) and "Traceback" not in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    assert json.loads(results.read_text())
