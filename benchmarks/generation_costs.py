"""Seconds that a real engine takes to generate, next to the seconds that `slime plan` predicts.

Each load is sent to a fresh prefix cache at once, at most `max_running` requests at a time: random prompts,
and responses whose lengths are fixed in advance. The cost model is calibrated on the rows marked "fitted";
the others test it (goal: within 20%).

    python benchmarks/generation_costs.py --shapes 0.6b 4b --engine sglang --sglang-python PATH    # one GPU
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rollout_throughput import flush_cache, read_flags, serving
from shapes import MIXTURES, SHAPES, config_of, write_model

from slime.catalog.gpus import GPUS
from slime.preflight.step_costs import EnginePlan, Model, Work
from slime.utils.async_utils import run

GOAL = 0.2


@dataclass(frozen=True)
class Load:
    """Responses with lengths of `work`, at most `max_running` at a time."""

    name: str
    work: Work
    max_running: int


LOADS = (
    Load("plain", Work(128, 256, 512, 0.0), 64),
    Load("wide", Work(512, 32, 950, 0.0), 256),
    Load("alone", Work(1, 128, 512, 0.0), 1),
    Load("long responses", Work(64, 128, 4096, 0.0), 64),
    Load("long prompts", Work(256, 4096, 64, 0.0), 256),
    Load("long tail", Work(256, 64, 380, 0.9, 4096), 256),
    Load("waves", Work(256, 512, 256, 0.6, 1024), 32),
)
FITTED = {
    ("4b", "plain"),
    ("4b", "wide"),
    ("4b", "long responses"),
    ("4b", "long prompts"),
    ("0.6b", "wide"),
    ("0.6b", "alone"),
    ("0.6b", "waves"),
    ("8b", "waves"),
}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", nargs="+", default=["tiny"], choices=(*SHAPES, *MIXTURES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--gpu", default="h200", choices=tuple(GPUS))
    parser.add_argument("--loads", nargs="+", default=[load.name for load in LOADS])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/generation_costs.json"))
    return parser.parse_known_args()


def payloads(load: Load, vocabulary: int) -> list[dict[str, Any]]:
    rng = random.Random(load.name)
    lengths = load.work.lengths()
    chosen = [round(lengths[i % len(lengths)]) for i in range(load.work.samples)]
    rng.shuffle(chosen)
    return [
        {
            "input_ids": [rng.randrange(2, vocabulary) for _ in range(int(load.work.prompt))],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": max(1, length), "ignore_eos": True},
            "return_logprob": True,
        }
        for length in chosen
    ]


async def generate(url: str, bodies: list[dict[str, Any]], at_once: int) -> tuple[int, float]:
    """The number of tokens, and seconds from the first request to the last response."""
    slots, timeout = asyncio.Semaphore(at_once), aiohttp.ClientTimeout(total=None)

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> int:
        async with slots, session.post(url, json=body) as response:
            return len((await response.json())["output_ids"])

    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(session, body) for body in bodies)))
        return tokens, time.perf_counter() - started


def measure(shape: str, options: argparse.Namespace, extra: list[str], rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        tiny = shape in ("tiny", "tiny-moe")
        dummy = options.engine == "sglang"
        write_model("4b" if shape in MIXTURES else shape, model, weights=not dummy)
        if shape in MIXTURES:
            config = config_of(shape)
            config.architectures = ["Qwen3MoeForCausalLM"]
            config.save_pretrained(model)
        words = ["--sglang-load-format", "dummy", *extra] if dummy else extra
        # The largest load decides how many requests a server takes at a time.
        for_flags = argparse.Namespace(
            run_dir=None, num_prompts=8, samples_per_prompt=8, output_tokens=64, prompt_tokens=64,
            concurrency=256, engine=options.engine, engine_url=None,
        )  # fmt: skip
        args = read_flags(for_flags, words, folder, model)
        config = json.loads((model / "config.json").read_text())
        with serving(args) as port:
            base = f"http://127.0.0.1:{port}"
            run(generate(f"{base}/generate", payloads(LOADS[0], config["vocab_size"]), 64))  # warm-up
            for load in LOADS:
                if load.name not in options.loads or (tiny and load.work.prompt + 4096 > 2048):
                    continue
                run(flush_cache(base))
                bodies = payloads(load, config["vocab_size"])
                tokens, seconds = run(generate(f"{base}/generate", bodies, load.max_running))
                plan = EnginePlan(Model(config), GPUS[options.gpu], 1, load.max_running)
                predicted = plan.generate_s(load.work, load.work.samples)
                rows.append(
                    {"shape": shape, "load": load.name, "tokens": tokens, "measured_s": seconds,
                     "predicted_s": predicted, "error": predicted / seconds - 1,
                     "fitted": (shape, load.name) in FITTED, "work": asdict(load.work)}
                )  # fmt: skip
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
                show(rows[-1])


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['shape']:6s} {row['load']:15s} {row['tokens'] / row['measured_s']:8.0f} tokens/s  measured "
        f"{row['measured_s']:7.2f} s  predicted {row['predicted_s']:7.2f} s  {row['error']:+.0%}"
        + ("  fitted" if row["fitted"] else ""),
        flush=True,
    )


def main() -> int:
    options, extra = parse()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        measure(shape, options, extra, rows)
    with contextlib.suppress(ValueError):
        worst = max(abs(row["error"]) for row in rows if not row["fitted"])
        print(f"largest error of the rows that were not fitted: {worst:.0%} (goal {GOAL:.0%})")
        return 0 if worst <= GOAL else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
