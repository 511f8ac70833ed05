"""How fast is a training step beside one of verl's FSDP engine, and do both compute the same?

    sh benchmarks/peers/make_verl_env.sh .venv-verl
    python benchmarks/peers/verl_step.py --verl-python .venv-verl/bin/python --model-path FOLDER
    python benchmarks/peers/verl_step.py --verl-python .venv-verl/bin/python --shape tiny   (does it work?)

One on-policy GRPO step (log-probs and entropy, clipped loss by token, backward, gradient norm, AdamW) of
both, on the same weights, samples, advantages and old log-probs, in turns; one rank, medians behind the first
two steps. Groups of 8 answers to one prompt, as in the SmolLM2 quick start. The gradient norms of the first
step are compared. What differs: verl pads (its packed form asks for FlashAttention) and computes a prompt
with every answer.
"""

import argparse
import json
import logging
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import free_memory, synchronize
from shapes import SHAPES, write_model
from shared_prefix import make_samples

from slime.arguments import default_args
from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample

SKIPPED_STEPS = 2
PEER = Path(__file__).with_name("verl_engine.py")
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl-python", required=True)
    parser.add_argument("--model-path", help="a Hugging Face folder; else random weights of --shape")
    parser.add_argument("--shape", default="0.6b", choices=tuple(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=tuple(SHORT))
    parser.add_argument("--groups", type=int, default=6, help="prompts of a step, of 8 samples each")
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--answer-tokens", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens of a micro-batch, of both")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/verl_step.json"))
    options = parser.parse_args()
    if shutil.which(options.verl_python) is None:
        parser.error(f"--verl-python {options.verl_python} is no program: make_verl_env.sh makes one")
    return options


def ours(options: argparse.Namespace, model: str, samples: list[Sample]) -> dict[str, Any]:
    """Seconds of steps and the first gradient norm; and what verl is given: advantages and old log-probs."""
    device = torch.device(options.device)
    args = default_args(
        hf_checkpoint=model,
        dtype=options.dtype,
        lr=1e-6,
        weight_decay=0.0,
        calculate_per_token_loss=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=options.max_tokens,
    )
    backend = create_backend(args, rank=0, world_size=1, device=device)
    (data,) = split_for_ranks(args, samples_to_batch(args, samples), 1)
    order = data.batch["sample_indices"]
    scored = backend.log_probs(build_micro_batches(data.batch, data.micro_batches)).log_probs
    old = {index: row.tolist() for index, row in zip(order, scored, strict=True)}
    spent, reports = [], []
    for _ in range(options.steps):
        free_memory(device)
        started = _now(device)
        reports.append(TrainingStep(backend, args, 0, data).run())
        spent.append(_now(device) - started)
    advantages = {
        index: [reward] * sample.response_length
        for index, reward, sample in zip(
            order, data.batch["rewards"], (samples[i] for i in order), strict=True
        )
    }
    return {
        "steps_s": spent,
        "grad_norm": reports[0].steps[0]["train/grad_norm"],
        "old_log_probs": [old[i] for i in range(len(samples))],
        "advantages": [advantages[i] for i in range(len(samples))],
    }


def verl(
    options: argparse.Namespace, model: str, samples: list[Sample], given: dict[str, Any], folder: Path
) -> dict[str, Any]:
    asked = {
        "model": model,
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "old_log_probs": given["old_log_probs"],
        "advantages": given["advantages"],
        "device": options.device,
        "dtype": SHORT[options.dtype],
        "max_tokens": options.max_tokens,
        "lr": 1e-6,
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "out": str(folder / "verl.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if options.device == "cpu":
        environment["VERL_PLATFORM"] = "cpu"
    ended = subprocess.run(
        [options.verl_python, str(PEER), str(folder / "asked.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"verl ended with {ended.returncode}: {ended.stdout[-3000:]}")
    return json.loads((folder / "verl.json").read_text())


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.ERROR)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    rows: dict[str, list[float]] = {"slime": [], "verl": []}
    norms, version = [], ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model_path or str(write_model(options.shape, folder / "model"))
        vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        samples = make_samples(options.groups, options.prompt_tokens, options.answer_tokens, vocab)
        for _ in range(options.pairs):
            own = ours(options, model, samples)
            free_memory(torch.device(options.device))
            peer = verl(options, model, samples, own, folder)
            rows["slime"] += own["steps_s"][SKIPPED_STEPS:]
            rows["verl"] += peer["steps_s"][SKIPPED_STEPS:]
            norms.append((own["grad_norm"], peer["grad_norm"]))
            version = peer["version"]
    medians = {name: statistics.median(spent) for name, spent in rows.items()}
    print(f"slime {medians['slime']:.3f} s a step, verl {version} {medians['verl']:.3f} s: "
          f"verl / slime {medians['verl'] / medians['slime']:.2f}")  # fmt: skip
    print("gradient norm of the first step, slime and verl:", norms)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"seconds": rows, "medians": medians, "grad_norms": norms, "verl": version}, indent=1)
    )


if __name__ == "__main__":
    main()
