"""Launch lines of slime really run: the flags as they are, with tiny models, data and sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_lines import MODELS, RECIPES
from tiny_model import make_tiny_tokenizer

pytest.importorskip("megatron.core")

from megatron_families import make_checkpoint

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SIZES = {
    "--num-epoch": "1",
    "--num-rollout": "1",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--global-batch-size": "4",
    "--rollout-max-response-len": "12",
    "--n-samples-per-eval-prompt": "1",
    "--eval-max-response-len": "12",
    "--max-tokens-per-gpu": "256",
    "--actor-num-gpus-per-node": "1",
    "--actor-num-nodes": "1",
    "--rollout-num-gpus": "1",
    "--rollout-num-gpus-per-engine": "1",
}
SCRIPT = """#!/bin/bash
set -ex
pkill -9 sglang; sleep 3; ray stop --force || true
export PYTHONBUFFERED=16
ARGS=( {words} )  # model, data, sizes
ray start --head --num-gpus ${{NUM_GPUS:-8}} --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{{"env_vars": {{"A": "b"}}}}' \\
   -- python3 train.py \\
   ${{ARGS[@]}} "$@"
"""
LAUNCHER = """
import slime.utils.external_utils.command_utils as U

U.execute_train(train_args={words!r}, num_gpus_per_node=2, megatron_model_type="tiny",
                train_script={script!r}, extra_env_vars={{"A": "b"}})
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
            "label": str(2 * i),
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"ok {i}"},
            ],
        }
        for i in range(8)
    ]
    for file in ("dapo.jsonl", "aime.jsonl"):
        (root / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Commands of scripts that are not for this machine: jobs run here, and nobody is killed.
    (root / "bin").mkdir()
    stubs = {"pkill": "", "sleep": "", "python3": f'exec {sys.executable} "$@"'}
    stubs["ray"] = 'while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done; shift; "$@"'
    for name, body in stubs.items():
        (root / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (root / "bin" / name).chmod(0o755)
    return root


def tiny_line(world, model, recipe, run):
    """The line with small sizes, and the embedded engine in place of SGLang."""
    if not (world / model).exists():
        make_checkpoint(world, model, max_position_embeddings=256)
        make_tiny_tokenizer().save_pretrained(world / model)
        (world / f"{model}_torch_dist").mkdir()
        (world / f"{model}_torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
    words, value = [], None
    for word in f"{MODELS[model]} {RECIPES[recipe]}".format(root=world, model=model).split():
        if word.startswith("--"):
            skipped, value = word.startswith("--sglang-"), SIZES.get(word)
        elif value is not None:
            word, value = value, None
        if not skipped:
            words.append(word)
    threads = ["--trainer-threads", "1", "--engine-threads", "1", "--run-dir", str(world / run)]
    return [*words, "--rollout-engine", "embedded", *threads]


def check(world, run, command, cwd=ROOT):
    env = {**os.environ, "PATH": f"{world}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=cwd, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = [json.loads(line) for line in (world / run / "metrics.jsonl").read_text().splitlines()]
    return {name: value for row in rows for name, value in row.items()}


def test_a_bash_script_with_arrays_and_a_ray_job(world):
    words = tiny_line(world, "glm4_moe", "colocated", "bash")
    file = world / "run.sh"
    file.write_text(SCRIPT.format(words=" ".join(f'"{word}"' for word in words)))
    metrics = check(world, "bash", ["bash", str(file), "--log-correct-samples"])
    assert "train/grad_norm" in metrics and "rollout/correct_samples" in metrics
    assert (world / "glm4_moe_slime").exists()


def test_a_python_launcher(world):
    words = " ".join(f"'{word}'" for word in tiny_line(world, "qwen3", "debugged", "python"))
    (world / "run.py").write_text(LAUNCHER.format(words=words, script="train.py"))
    metrics = check(world, "python", [sys.executable, str(world / "run.py")])
    assert "train/train_rollout_logprob_abs_diff" in metrics
    assert len(list((world / "details").glob("*/*.pt"))) == 2


def test_supervised_fine_tuning_by_epochs_with_a_schedule(world):
    words = tiny_line(world, "llama", "sft", "sft")
    metrics = check(world, "sft", [sys.executable, "train_async.py", *words])
    assert metrics["train/loss"] > 0 and 0 < metrics["train/lr-pg_0"] < 1e-5
