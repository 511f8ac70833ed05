"""A GRPO run with engine and trainer on one device: does the reward move, what
does a step cost, how full is the device?

Random weights, so nothing needs a download. The reward is the share of even token ids in the answer: one half
by chance, and a policy that learns leaves it soon. The run is an ordinary one (`slime train`); this script
makes the model, and then reads the metrics: reward and loss per step, seconds of each part, and the peak of
device memory in each phase.

    python benchmarks/colocated_grpo.py --shape tiny                     # embedded engine, any machine
    python benchmarks/colocated_grpo.py --shape 0.6b --engine sglang --sglang-python PATH    # one GPU
    SLIME_RANKS_PER_GPU=2 python benchmarks/colocated_grpo.py --shape 0.6b --engine sglang --side-by-side \
        --long-tail --asynchronous --update-weight-transport distributed   # both at once, by NCCL
"""

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_model

from slime.arguments import parse_args
from slime.cli.convert import main as convert_main
from slime.cli.main import user_errors
from slime.cli.quickstart.tiny import CHARACTERS
from slime.utils.machine.accelerator import device_count

LEARNING_RATES = {"tiny": 5e-3, "0.6b": 1e-4, "4b": 5e-5, "8b": 5e-5}
CHANCE, MOVED = 0.5, 0.05
VOCAB = 512  # few tokens, so that each is tried often enough to learn about it within some steps
COLUMNS = {
    "reward": "rollout/raw_reward",
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
    "|logp diff|": "train/train_rollout_logprob_abs_diff",
    "step s": "perf/step_time",
    "rollout s": "perf/rollout_time",
    "pause s": "perf/update_weights_pause_time",
    "push s": "perf/update_weights_time",
    "staleness": "rollout/staleness/mean",
    "rollout GiB": "perf/peak_memory_rollout_gib",
    "offload GiB": "perf/peak_memory_offload_gib",
    "train GiB": "perf/peak_memory_train_gib",
    "push GiB": "perf/peak_memory_push_gib",
}


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of even token ids in the answer."""
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in answer) / max(1, len(answer))


async def generate_long_tail(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """An answer of log-normal length, the same for a sample in every run; the longest are cut."""
    from slime.rollout.sglang_rollout import generate as usual

    limit = sampling_params["max_new_tokens"]
    drawn = random.Random(sample.index).lognormvariate(math.log(limit / 8), 1.0)
    return await usual(
        args, sample, {**sampling_params, "max_new_tokens": min(limit, int(drawn) + 1), "ignore_eos": True}
    )


async def generate_whole(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """An answer that the end token does not end."""
    from slime.rollout.sglang_rollout import generate as usual  # late: the benchmark itself needs none of it

    return await usual(args, sample, {**sampling_params, "ignore_eos": True})


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--whole-answers", action="store_true", help="every answer has --output-tokens: none ends by itself"
    )
    parser.add_argument("--long-tail", action="store_true", help="lengths of answers are log-normal")
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="engine and trainer at once, each with a device of its own",
    )
    parser.add_argument("--asynchronous", action="store_true", help="the loop of train_async.py")
    parser.add_argument("--lr", type=float, help="default: by shape")
    parser.add_argument("--fp8-folder", action="store_true", help="start from the model as an FP8 checkpoint")
    parser.add_argument(
        "--device-gib", type=float, help="as on a GPU of this size: the rest is taken before the run starts"
    )
    parser.add_argument("--run-dir", type=Path, help="default: a temporary folder")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/colocated_grpo.json"))
    return parser.parse_known_args()


def flags(options: argparse.Namespace, folder: Path) -> list[str]:
    rng = random.Random(0)
    prompts = folder / "prompts.jsonl"
    rows = [
        {"input": "".join(rng.choices(CHARACTERS, k=32)), "label": "0"}
        for _ in range(options.steps * options.prompts)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    device = "cuda" if device_count() else "cpu"
    model = write_model(options.shape, folder / "model", device=device, vocab_size=VOCAB)
    if options.fp8_folder:
        fp8 = folder / "model-fp8"
        convert_main(["hf-to-fp8", "--hf-checkpoint", str(model), "--save", str(fp8)])
        model = fp8
    settings = {
        "--hf-checkpoint": model,
        "--run-dir": options.run_dir or folder / "run",
        "--prompt-data": prompts,
        "--label-key": "label",
        "--custom-rm-path": f"{__file__}:reward",
        "--num-rollout": options.steps,
        "--rollout-batch-size": options.prompts,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": options.output_tokens,
        "--rollout-engine": options.engine,
        "--lr": options.lr or LEARNING_RATES[options.shape],
        "--lr-decay-style": "constant",
        "--max-tokens-per-gpu": 16384,
        "--actor-num-gpus-per-node": 1,
    }
    if options.whole_answers:
        settings["--custom-generate-function-path"] = f"{__file__}:generate_whole"
    if options.long_tail:
        settings["--custom-generate-function-path"] = f"{__file__}:generate_long_tail"
    if options.side_by_side:
        settings["--rollout-num-gpus"] = 1
    words = [str(token) for item in settings.items() for token in item]
    return [*words, *([] if options.side_by_side else ["--colocate"]), "--use-dynamic-batch-size"]


def take_all_but(gib: float) -> Any:
    """Device memory that nobody else gets while this is referenced."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device="cuda")
    print(f"{held.numel() / 2**30:.1f} GiB of the device are taken: peaks below count them too")
    return held


def read_steps(path: Path) -> list[dict[str, float]]:
    """One row per step. The push after step i is logged with the rollout that uses it, i + 1; an evaluation
    with the step behind which it was made.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for axis in ("rollout/step", "train/step", "eval/step"):
            if axis in record:
                steps.setdefault(int(record[axis]), {}).update(record)
    return [steps[i] for i in sorted(steps)]


def report(steps: list[dict[str, float]]) -> None:
    shown = {title: name for title, name in COLUMNS.items() if any(name in step for step in steps)}
    print("step " + " ".join(f"{title:>11s}" for title in shown))
    for i, step in enumerate(steps):
        print(
            f"{i:4d} "
            + " ".join(f"{step[name]:11.4g}" if name in step else " " * 11 for name in shown.values())
        )


def main() -> int:
    options, extra = parse()
    if options.device_gib and not device_count():
        sys.exit("--device-gib takes memory of a GPU, and torch finds none on this machine")
    # Only now: the loop brings the trainer and the engines, which --help need not wait for.
    if options.asynchronous:
        from slime.loop_async import train
    else:
        from slime.loop import train

    with tempfile.TemporaryDirectory() as name:
        with user_errors():
            args = parse_args([*flags(options, Path(name)), *extra])
        held = take_all_but(options.device_gib) if options.device_gib else None
        train(args)
        del held
        steps = read_steps(Path(args.run_dir) / "metrics.jsonl")
    report(steps)
    rewards = [step["rollout/raw_reward"] for step in steps if "rollout/raw_reward" in step]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} ({CHANCE} by chance)")
    shares = [
        (s["perf/rollout_time"] + s["perf/train_time"]) / s["perf/step_time"]
        for s in steps
        if "perf/step_time" in s
    ]
    print("(generation + training) / step: " + " ".join(f"{share:.3f}" for share in shares))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"flags": extra, "rewards": rewards, "steps": steps}, indent=1) + "\n")
    return 0 if rewards[-1] - rewards[0] > MOVED else 1


if __name__ == "__main__":
    sys.exit(main())
