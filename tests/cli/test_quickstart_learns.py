"""The quick start, as a user runs it: it learns, its control does not, and it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from glossary import assert_in_glossary
from patience import eventually

from slime.cli.quickstart.two_runs import PRESETS

ROOT = Path(__file__).resolve().parents[2]


def quickstart(run_dir, *flags, timeout_s=1500):
    command = [sys.executable, "-m", "slime", "quickstart", "--run-dir", str(run_dir), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("sft", "rl"):
        assert_in_glossary(run_dir / part)
    return json.loads((run_dir / "summary.json").read_text()), done.stdout


def assert_learned(summary, *, num_held_out=500):
    assert summary["num_held_out"] >= num_held_out
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.9
    assert summary["reward_after"] > summary["reward_before"] + 0.3


@pytest.mark.timeout(1600)
def test_the_quick_start_learns_to_sort(tmp_path):
    """Six steps show it: without learning the accuracy stays as it is (`--control random-reward`, a slow
    test, as are all 50 steps of each seed, which end above 0.9)."""
    summary, shown = quickstart(tmp_path, "--seed", "0", "--num-rollout", "6", "--require-accuracy", "0.6")
    assert summary["num_held_out"] >= 500
    assert summary["accuracy_before"] < 0.45
    assert summary["accuracy_after"] >= max(0.6, summary["accuracy_before"] + 0.2)
    assert summary["reward_after"] > summary["reward_before"] + 0.15
    assert summary["num_steps"] == 6
    assert summary["weight_pushes"] == summary["num_steps"] + 1
    assert summary["num_samples"] == summary["num_steps"] * 32 * 16
    assert "known behaviour to choose" in " ".join(shown.split())
    mine = str(tmp_path)
    eventually(
        lambda: not any(mine in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_learns(tmp_path, seed):
    summary, _ = quickstart(tmp_path, "--seed", str(seed))
    assert_learned(summary)
    assert summary["num_steps"] == 50


@pytest.mark.slow
@pytest.mark.parametrize("estimator", sorted(set(PRESETS) - {"grpo"}))
def test_every_estimator_with_a_preset_learns(tmp_path, estimator):
    summary, shown = quickstart(tmp_path, "--advantage-estimator", estimator)
    assert_learned(summary)
    assert summary["advantage_estimator"] == estimator
    assert f"Preset of {estimator}:" in shown


@pytest.mark.slow
def test_accuracy_does_not_rise_under_random_rewards(tmp_path):
    summary, shown = quickstart(tmp_path, "--control", "random-reward")
    assert summary["accuracy_after"] <= summary["accuracy_before"] + 0.05
    assert "did not rise" in shown


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_learns_to_answer_briefly_and_rightly(tmp_path):
    summary, shown = quickstart(tmp_path, "--model", "smollm2", timeout_s=3500)
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.8
    assert "it did not learn to add" in " ".join(shown.split())
