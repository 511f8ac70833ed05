"""What the end-to-end tests share: a tiny model, a task, command lines, readers of what a run left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import warm_start
from glossary import assert_in_glossary
from patience import PATIENCE_S
from tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
REWARD = '''
"""The share of letters 'a' in the answer: dense, cheap, and different between samples."""


async def reward(args, sample, **kwargs):
    return sample.response.count("a") / max(1, sample.response_length) + 0.01 * (sample.index % 7)
'''


def make_world(folder: Path) -> Path:
    """A folder with `model/`, `prompts.jsonl` and `reward.py`."""
    make_tiny_model(folder / "model")
    rows = [{"input": f"say a {i}", "label": str(i)} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def flags(world: Path, run: str, **changes) -> list[str]:
    """A command line; a value of None removes a flag, True makes it a switch."""
    values = {
        "hf_checkpoint": world / "model",
        "prompt_data": world / "prompts.jsonl",
        "label_key": "label",
        "custom_rm_path": f"{world}/reward.py:reward",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "num_rollout": 3,
        "rollout_max_response_len": 12,
        "rollout_shuffle": True,
        "lr": 1e-3,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 256,
        "run_dir": world / run,
        "trainer_threads": 1,
        "engine_threads": 1,
        **changes,
    }
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    return words


def command(world: Path, run: str, script: str = "train.py", **changes) -> list[str]:
    return [sys.executable, str(ROOT / script), *flags(world, run, **changes)]


def run_train(
    world: Path,
    run: str,
    *,
    check: bool = True,
    timeout: float = PATIENCE_S,
    script: str = "train.py",
    **changes,
):
    """Run to the end in a process of its own, as a user would."""
    done = subprocess.run(
        command(world, run, script, **changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    if check:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert_in_glossary(Path(changes.get("run_dir", world / run)))
    return done


def start_train(world: Path, run: str, **changes) -> subprocess.Popen:
    """Start a run, its output in `<run>.out`, and do not wait for it."""
    with open(world / f"{run}.out", "w") as log:
        return subprocess.Popen(
            command(world, run, **changes),
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            preexec_fn=warm_start.interruptible,
        )


def wait_for(condition, process: subprocess.Popen, seconds: float = PATIENCE_S):
    """The first true value of `condition()`, while the process runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)
    raise AssertionError("it never happened")


def metrics(world: Path, run: str) -> list[dict]:
    path = world / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def series(world: Path, run: str, name: str) -> dict[int, float]:
    """The last value of a metric for each step of its stage."""
    found = {}
    for row in metrics(world, run):
        if name in row:
            step = next(row[key] for key in ("train/step", "rollout/step", "eval/step") if key in row)
            found[step] = row[name]
    return found
