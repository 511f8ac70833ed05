"""Every benchmark that needs no finished run still runs, on shapes
that measure nothing: a renamed function must not wait for a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
QUICK = {
    "record_overhead": "--steps 2",
    "ledger_overhead": "--steps 2",
}
SLOW = {
    "train_step": "--device cpu --tiny --steps 1 --part 0.6b --profile",
    "rollout_throughput": "--concurrency 4 --num-prompts 2 --samples-per-prompt 2 --prompt-tokens 16 "
    "--output-tokens 8 --rounds 1",
    "weight_push": "--bucket-mib 1 --pushes 1",
    "colocated_grpo": "--steps 2 --prompts 2 --output-tokens 8",
    "fp8_training": "--shape tiny --device cpu --steps 8 --sequences 4 --length 32",
    "fp8_drift": "--steps 2 --prompts 2 --output-tokens 8 --cases fp8-start-stochastic",
    "long_tail": "--steps 3 --prompts 2 --median 4 --seeds 1 2 --eval-prompts 2",
    "rollout_overhead": "--sizes 50 --rounds 1 --concurrency 8",
    "rollout_scaling": "--sizes 20 40 --engines 1 3 --concurrency 8",
    "rollout_workers": "--responses 16 --tokens 100 --workers 1 2 --engines 1",
    "engine_throughput": "--num-requests 4 --max-running 2 --longest 16 --rounds 1",
    "delta_sync": "--shape tiny --tokens 16",
    "delta_push": "--bucket-mib 1 --pushes 2",
}
# A benchmark that misses its goal, as these shapes may, exits with 1 after it has written its results.
# Flags of `slime train` are handed on to it; it is `slime train` that finds a mistake in them.
HANDS_ON = ["rollout_throughput", "fp8_drift"]
HANDS_ON += [
    pytest.param(name, marks=pytest.mark.slow) for name in ("weight_push", "fp8_rollout", "long_tail")
]
CASES = [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]


def start(words):
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_a_benchmark_writes_its_results(name, flags, tmp_path):
    results = tmp_path / "results.json"
    done = start([f"benchmarks/{name}.py", *flags.split(), "--json", str(results)])
    assert done.returncode in (0, 1) and "Traceback" not in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    assert json.loads(results.read_text())


@pytest.mark.parametrize("name", HANDS_ON)
def test_a_wrong_flag_is_told_in_words_and_once(name, tmp_path):
    done = start([f"benchmarks/{name}.py", "--no-such-flag", "3", "--json", str(tmp_path / "results.json")])
    assert done.returncode and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("unknown flag --no-such-flag") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_colocated", "trl_grpo", "verl_engine"])
def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(name):
    without = "import runpy, sys; sys.modules.update(trl=None, verl=None); runpy.run_path(sys.argv.pop())"
    done = start(["-c", without, f"benchmarks/peers/{name}.py"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"make_{name.partition('_')[0]}_env.sh makes" in done.stderr


NEEDS = {
    "step_overhead --run-dir nowhere": "it is no folder of a run",
    "dashboard --samples 4": "groups have ten",
    "speculative --plain-url http://127.0.0.1:1 --speculative-url http://127.0.0.1:1": "no server answers",
    "peers/trl_quickstart --run-dir nowhere --trl-python nothing": "make it with `slime quickstart`",
}


@pytest.mark.parametrize("line", NEEDS)
def test_what_a_benchmark_needs_is_told_in_a_line(line):
    name, *flags = line.split()
    done = start([f"benchmarks/{name}.py", *flags])
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert NEEDS[line] in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "abacus"])
def test_a_device_that_is_not_there_is_told_in_a_line(device):
    done = start(["benchmarks/train_step.py", "--device", device])
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("train_step.py: error: ")
