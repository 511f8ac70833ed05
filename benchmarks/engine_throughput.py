"""How much faster than `model.generate` in batches is the embedded engine over HTTP?

64 requests with output lengths log-uniform in 8..256, at most 16 running on either side, the quick-start
model on a CPU. Only useful tokens count: a batch of `generate` runs until its longest request is done, and
what it makes for the others meanwhile is thrown away. The two sides take turns in one process tree, so that a
busy machine slows both.

    python benchmarks/engine_throughput.py [--rounds 5] [--threads 1] [--device cpu] [--json out.json]
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import present_device

from slime.cli.quickstart import tiny
from slime.engines.embedded.command import embedded_command
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.liveness.stacks import watch_exit
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.machine.children import thread_environment
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, SamplingParams

CONTEXT_LEN = 512


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--model-path", help="another model folder (default: the quick-start model, random weights)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/engine_throughput.json"))
    return parser.parse_args()


def make_requests(args: argparse.Namespace, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt ids, number of tokens to make) of each request."""
    rng = random.Random(args.seed)
    low, high = math.log(args.shortest), math.log(args.longest)
    lengths = [round(math.exp(rng.uniform(low, high))) for _ in range(args.num_requests)]
    return [([rng.randrange(4, vocab_size) for _ in range(rng.randint(6, 12))], length) for length in lengths]


def make_model(args: argparse.Namespace, folder: Path) -> str:
    if args.model_path:
        return args.model_path
    from transformers import Qwen3ForCausalLM

    config = tiny.build_config()
    config.max_position_embeddings = CONTEXT_LEN  # the quick start itself needs 128
    torch.manual_seed(args.seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return str(folder)


def start_engine(args: argparse.Namespace, model_path: str, folder: Path) -> EngineServer:
    command = embedded_command(
        model_path=model_path,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        max_running_requests=args.max_running,
        max_total_tokens=None,
        seed=args.seed,
        shm_prefix=f"slime-{os.getpid()}-bench",
        await_weights=False,
    )
    env = {**thread_environment(args.threads), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    server = EngineServer(
        LaunchPlan("embedded engine", command, env, folder / "engine.log", start_timeout_s=300)
    )
    server.launch()
    server.wait_ready()
    return server


async def run_engine(url: str, requests: list[tuple[list[int], int]]) -> float:
    client = EngineClient(url)
    start = time.perf_counter()
    made = await asyncio.gather(
        *[
            client.generate(GenerateRequest(ids, SamplingParams(max_new_tokens=length, ignore_eos=True)))
            for ids, length in requests
        ]
    )
    wall_s = time.perf_counter() - start
    for (_, length), generation in zip(requests, made, strict=True):
        assert len(generation.ids) == len(generation.log_probs) == length, (
            "the engine made another number of tokens"
        )
    return wall_s


@torch.inference_mode()
def run_generate(model, requests: list[tuple[list[int], int]], batch_size: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        width, longest = max(len(ids) for ids, _ in batch), max(length for _, length in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        ).cpu()
    return time.perf_counter() - start


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_path = make_model(args, folder / "model")
        model = (
            AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, args.dtype))
            .to(args.device)
            .eval()
        )
        requests = make_requests(args, model.config.vocab_size)
        server = start_engine(args, model_path, folder)
        try:
            report = compare(args, server.url, model, requests)
        finally:
            run(http_utils.close_session())
            server.stop()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")


def compare(args: argparse.Namespace, url: str, model, requests: list[tuple[list[int], int]]) -> dict:
    useful = sum(length for _, length in requests)
    run(run_engine(url, requests[: args.max_running]))  # warm both sides up
    run_generate(model, requests[: args.max_running], args.max_running)
    walls = {"embedded engine over HTTP": [], "model.generate in batches": []}
    ratios = []
    for _ in range(args.rounds):
        engine_s = run(run_engine(url, requests))
        generate_s = run_generate(model, requests, args.max_running)
        walls["embedded engine over HTTP"].append(engine_s)
        walls["model.generate in batches"].append(generate_s)
        ratios.append(generate_s / engine_s)
    print(f"{len(requests)} requests, {useful} useful tokens, at most {args.max_running} running, "
          f"{args.device}, {args.threads} threads, {args.rounds} rounds")  # fmt: skip
    print(f"{'side':28} {'wall s (median)':>16} {'useful tokens/s':>16}")
    for side, values in walls.items():
        print(f"{side:28} {statistics.median(values):16.2f} {useful / statistics.median(values):16.0f}")
    ratio = statistics.median(ratios)
    print(f"ratio: {ratio:.2f} (median of {len(ratios)}, from {min(ratios):.2f} to {max(ratios):.2f})")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {"settings": settings, "useful_tokens": useful, "wall_s": walls, "ratios": ratios, "ratio": ratio}


if __name__ == "__main__":
    main()
    watch_exit()
