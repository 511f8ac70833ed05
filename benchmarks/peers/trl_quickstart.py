"""How fast is a step of the quick start beside one of TRL's GRPOTrainer, on the same work?

    slime quickstart --run-dir runs/quickstart  # start model, prompts, questions
    sh benchmarks/peers/make_trl_env.sh .venv-trl
    python benchmarks/peers/trl_quickstart.py --run-dir runs/quickstart --trl-python .venv-trl/bin/python

Same start model (after the warm-up), prompts, batch, reward and number of steps; the two take turns in one
run, so that a busy machine slows both. Seconds are medians over the steps behind the first two; CPU seconds
are those of all processes over the whole run, the start included. What differs: TRL computes its own
generation in the trainer's process with `model.generate`, keeps no record of samples, drops no group and
evaluates nothing.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import slime

SKIPPED_STEPS = 2
PEER = Path(__file__).with_name("trl_grpo.py")
OWN_FOLDER = ("load", "save", "save-hf", "save-interval", "eval-config", "eval-interval")
# What a run keeps, and what of that costs time: the quick start keeps checkpoints, and so a whole ledger.
KEEPS = {"save-interval": 1_000_000}


def enough_prompts(settings: dict[str, Any], steps: int, folder: Path) -> Path:
    """The prompts, again and again: a checkpoint follows each pass over them, and none is to be measured."""
    lines = Path(settings["prompt-data"]).read_text().splitlines(keepends=True)
    times = -(-(steps + 1) * settings["rollout-batch-size"] // len(lines))
    path = folder / "prompts.jsonl"
    path.write_text("".join(lines * times))
    return path


def run_ours(settings: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    own = {name: value for name, value in settings.items() if name not in OWN_FOLDER}
    own |= {"run-dir": str(folder / "run"), "save": str(folder / "checkpoints"), "num-rollout": steps} | KEEPS
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(own))
    cpu_s = _cpu_of([sys.executable, "-m", "slime", "train", "--config", str(config), "--quiet"], folder)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps_s": [row["perf/step_time"] for row in rows if "perf/step_time" in row],
        "rewards": [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row],
        "cpu_s": cpu_s,
        "version": slime.__version__,
    }


def run_trl(settings: dict[str, Any], steps: int, folder: Path, python: str) -> dict[str, Any]:
    asked = {
        "model": settings["hf-checkpoint"],
        "prompts": settings["prompt-data"],
        "out": str(folder / "out.json"),
        "steps": steps,
        "num_prompts": settings["rollout-batch-size"],
        "num_samples": settings["n-samples-per-prompt"],
        "max_tokens": settings["rollout-max-response-len"],
        "lr": settings["lr"],
        "warmup": settings.get("lr-warmup-iters", 0),
        "betas": [settings["adam-beta1"], settings["adam-beta2"]],
        "chat": bool(settings.get("apply-chat-template")),
        "exact": settings["custom-rm-path"].endswith("exact_match"),
        "dtype": settings.get("dtype", "float32"),
        "seed": settings["seed"],
    }
    cpu_s = _cpu_of([python, str(PEER), json.dumps(asked)], folder)
    return {**json.loads((folder / "out.json").read_text()), "cpu_s": cpu_s}


def _cpu_of(command: list[str], folder: Path) -> float:
    """Seconds of the command and all that it started; its output is in `folder`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    if ended.returncode:
        raise SystemExit(
            f"{command[:3]} ended with {ended.returncode}: {(folder / 'log.txt').read_text()[-2000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of a finished quick start")
    parser.add_argument("--trl-python", required=True, help="the interpreter of TRL's environment")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/trl_quickstart.json"))
    options = parser.parse_args()
    if not (options.run_dir / "run.yaml").is_file():
        parser.error(f"--run-dir {options.run_dir} has no run.yaml: make it with `slime quickstart`")
    if shutil.which(options.trl_python) is None:
        parser.error(f"--trl-python {options.trl_python} is no program: make_trl_env.sh makes one")
    settings = yaml.safe_load((options.run_dir / "run.yaml").read_text())
    made: dict[str, list[dict[str, Any]]] = {"slime": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        settings["prompt-data"] = str(enough_prompts(settings, options.steps, Path(name)))
        for pair in range(options.pairs):
            for peer in made:
                folder = Path(name) / f"{peer}-{pair}"
                folder.mkdir()
                made[peer].append(
                    run_ours(settings, options.steps, folder)
                    if peer == "slime"
                    else run_trl(settings, options.steps, folder, options.trl_python)
                )
                print(peer, _median(made[peer][-1:]), "s a step", flush=True)
    report(made, options.json)


def _median(runs: list[dict[str, Any]]) -> float:
    return statistics.median(s for run in runs for s in run["steps_s"][SKIPPED_STEPS:])


def report(made: dict[str, list[dict[str, Any]]], path: Path) -> None:
    ours, theirs = (_median(runs) for runs in made.values())
    cpu = [statistics.mean(run["cpu_s"] for run in runs) for runs in made.values()]
    last = [runs[-1]["rewards"][-1] for runs in made.values()]
    print("| | slime | TRL |\n|---|---|---|")
    print(f"| seconds a step | {ours:.3f} | {theirs:.3f} |")
    print(f"| CPU seconds of a run | {cpu[0]:.1f} | {cpu[1]:.1f} |")
    print(f"| reward of the last step | {last[0]:.3f} | {last[1]:.3f} |")
    print(f"TRL's step / ours: {theirs / ours:.2f}")
    print(f"slime {made['slime'][0]['version']}; {made['trl'][0]['version']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": made, "seconds": {"slime": ours, "trl": theirs}}, indent=1))


if __name__ == "__main__":
    main()
