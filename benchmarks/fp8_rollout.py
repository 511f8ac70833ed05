"""How much faster does an engine answer in FP8? Output tokens per second of two SGLang servers on one device.

Both have random weights of one shape. One serves in bfloat16; the other has weights in FP8, in blocks of
128 x 128 as `--rollout-quantization fp8` pushes them, and its key-value cache in FP8 too. They take turns
with the same requests, which come as many at a time as a rollout sends, and which begins alternates.
Goal: a ratio of 1.25.

    python benchmarks/fp8_rollout.py --shape 4b --sglang-python PATH [--sglang-attention-backend fa3 ...]

`--for-bf16` and `--for-fp8` take flags of one of them: the fastest attention for a cache in 16 bit need not
be that for one in FP8. Both must find room on the device: `--sglang-mem-fraction-static 0.45` leaves it to
the second.
"""

import argparse
import contextlib
import json
import random
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_throughput import bare_round, flush_cache, serving
from shapes import SHAPES, write_model

from slime.arguments import parse_args
from slime.cli.main import user_errors
from slime.utils.async_utils import run
from slime.weight_sync.fp8 import SERVED_BLOCK, quantization_config

GOAL = 1.25
KINDS = ("bf16", "FP8")


@dataclass(frozen=True)
class Load:
    """Requests of one setting."""

    prompt_tokens: int
    output_tokens: int


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="4b", choices=tuple(SHAPES))
    parser.add_argument(
        "--loads",
        nargs="+",
        default=["128+512", "128+1024"],
        help="tokens of prompt + answer",
    )
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--waves", type=int, default=1, help="requests of a round, times those at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--for-bf16", type=shlex.split, default=[], help="flags of that server alone")
    parser.add_argument("--for-fp8", type=shlex.split, default=[], help="flags of that server alone")
    parser.add_argument("--cache-in-16-bit", action="store_true", help="FP8 for the weights alone")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/fp8_rollout.json"))
    options, extra = parser.parse_known_args()
    try:
        options.loads = [Load(*map(int, load.split("+"))) for load in options.loads]
    except (TypeError, ValueError):
        parser.error("--loads takes PROMPT+ANSWER in tokens, such as 128+512")
    return options, extra


def flags_of(
    kind: str, options: argparse.Namespace, model: Path, folder: Path, extra: list[str]
) -> list[str]:
    words = ["--hf-checkpoint", str(model), "--run-dir", str(folder / kind), "--rollout-engine", "sglang"]
    words += ["--prompt-data", str(folder / "prompts.jsonl"), "--label-key", "label", "--rm-type", "math"]
    words += ["--rollout-batch-size", "1", "--num-rollout", "1", "--debug-rollout-only"]
    words += ["--rollout-max-response-len", "16"]
    words += ["--sglang-server-concurrency", str(options.concurrency), "--sglang-load-format", "dummy"]
    if kind == "FP8":
        config = {"quantization_config": quantization_config(SERVED_BLOCK, kept=[])}
        words += ["--sglang-json-model-override-args", json.dumps(config)]
        words += [] if options.cache_in_16_bit else ["--sglang-kv-cache-dtype", "fp8_e4m3"]
    return [*words, *extra, *(options.for_fp8 if kind == "FP8" else options.for_bf16)]


def make_payloads(load: Load, count: int, vocab_size: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    sampling = {"max_new_tokens": load.output_tokens, "ignore_eos": True, "temperature": 1.0}
    return [
        {
            "input_ids": [rng.randrange(10, vocab_size) for _ in range(load.prompt_tokens)],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        for _ in range(count)
    ]


def warm_up(kind: str, url: str, options: argparse.Namespace, vocab_size: int) -> None:
    """Requests until a round is no faster than the one before: kernels are compiled at first use."""
    payloads, rates = make_payloads(options.loads[0], options.concurrency, vocab_size), [0.0]
    for _ in range(5):
        run(flush_cache(url))
        rates.append(bare_round(f"{url}/generate", payloads, options.concurrency).rate)
        if rates[-1] < 1.05 * rates[-2]:
            break
    print(f"{kind} is ready, after rounds of " + ", ".join(f"{r:.0f}" for r in rates[1:]), flush=True)


def compare(urls: dict[str, str], load: Load, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    payloads = make_payloads(load, options.waves * options.concurrency, vocab_size)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            run(flush_cache(urls[kind]))
            done = bare_round(f"{urls[kind]}/generate", payloads, options.concurrency)
            rates[kind].append(done.rate)
            print(f"{load.prompt_tokens}+{load.output_tokens}, round {number + 1}: {kind} {done.tokens} "
                  f"tokens in {done.seconds:.2f} s, {done.rate:.0f} tokens/s", flush=True)  # fmt: skip
    ratios = [fp8 / bf16 for bf16, fp8 in zip(*rates.values(), strict=True)]
    return {"load": vars(load), "rates": rates, "ratios": ratios, "ratio": statistics.median(ratios)}


def main() -> int:
    options, extra = parse()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        folder = Path(name)
        model = write_model(options.shape, folder / "model", weights=False)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        (folder / "prompts.jsonl").write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")
        urls = {}
        for kind in KINDS:
            with user_errors():
                args = parse_args(flags_of(kind, options, model, folder, extra))
            urls[kind] = f"http://127.0.0.1:{servers.enter_context(serving(args))}"
            warm_up(kind, urls[kind], options, vocab_size)
        results = [compare(urls, load, options, vocab_size) for load in options.loads]
    for result in results:
        medians = ", ".join(f"{kind} {statistics.median(result['rates'][kind]):.0f}" for kind in KINDS)
        load = result["load"]
        print(f"{options.shape}, {options.concurrency} at a time of {load['prompt_tokens']} + "
              f"{load['output_tokens']} tokens: {medians} tokens/s (medians), FP8 / bf16 "
              f"{result['ratio']:.3f}; goal {GOAL}")  # fmt: skip
    settings = {"shape": options.shape, "concurrency": options.concurrency, "waves": options.waves}
    settings |= {"for_bf16": options.for_bf16, "for_fp8": options.for_fp8}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"settings": settings, "flags": extra, "goal": GOAL, "loads": results}, indent=2) + "\n"
    )
    return 0 if all(result["ratio"] >= GOAL for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
