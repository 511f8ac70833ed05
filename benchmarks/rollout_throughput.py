"""Does the default rollout function keep an engine as busy as bare requests do?

Output tokens per second through `slime.rollout.sglang_rollout.generate_rollout` (data source, tokeniser,
log-probs, reward, filter) against bare aiohttp requests to the same running server: same prompts, same
sampling, same concurrency. The two sides take turns, the prefix cache is emptied before each round, and which
side begins alternates. Goal: a ratio of 0.97.

    python benchmarks/rollout_throughput.py --shape tiny                                (embedded engine)
    python benchmarks/rollout_throughput.py --shape 4b --engine sglang --sglang-python PATH [--sglang-... ]
    python benchmarks/rollout_throughput.py --engine-url http://127.0.0.1:30000 --model-path FOLDER
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from shapes import SHAPES, write_model

from slime.arguments import Args, RunInfo, parse_args, plugin_args
from slime.cli.main import user_errors
from slime.cli.quickstart.tiny import CHARACTERS
from slime.cluster.run_opening import open_run
from slime.cluster.serving.served_model import ModelService, make_servers
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generation.generate_request import build_request, prepare_prompt
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.runtime import create_runtime
from slime.runtime.placement import plan_placement
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.machine.accelerator import device_count
from slime.utils.types import flatten_samples

NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
GOAL = 0.97


@dataclass(frozen=True)
class Round:
    """One pass of one side over all prompts."""

    tokens: int
    seconds: float
    cpu_seconds: float  # of this process

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument(
        "--engine-url", help="a running server to use instead of launching one; needs --model-path"
    )
    parser.add_argument("--model-path", type=Path, help="model folder (default: random weights of --shape)")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, help="default: four times the concurrency in samples")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--run-dir", type=Path, help="where the engine's log goes (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rollout_throughput.json"))
    options, extra = parser.parse_known_args()
    if options.engine_url and not options.model_path:
        parser.error("--engine-url needs --model-path: the folder of the model that the server has")
    if options.num_prompts is None:
        options.num_prompts = max(1, 4 * options.concurrency // options.samples_per_prompt)
    return options, extra


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reads the answer, and is unlike within a group, so that the filter keeps all of them."""
    return len(sample.response) % 7 + float(sample.index % 2)


def write_prompts(path: Path, options: argparse.Namespace) -> Path:
    """Texts of exactly so many tokens: one character is one token."""
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(options.num_prompts):
            text = f"{i:08d} " + "".join(rng.choices(CHARACTERS, k=options.prompt_tokens - 9))
            file.write(json.dumps({"input": text, "label": str(i)}) + "\n")
    return path


def read_flags(options: argparse.Namespace, extra: list[str], folder: Path, model: Path) -> Args:
    flags = {
        "--hf-checkpoint": model,
        "--run-dir": options.run_dir or folder / "run",
        "--prompt-data": write_prompts(folder / "prompts.jsonl", options),
        "--label-key": "label",
        "--rollout-batch-size": options.num_prompts,
        "--n-samples-per-prompt": options.samples_per_prompt,
        "--num-rollout": 1,
        "--rollout-max-response-len": options.output_tokens,
        "--sglang-server-concurrency": options.concurrency,
        "--custom-rm-path": f"{__file__}:reward",
        "--dynamic-sampling-filter-path": NONZERO_STD,
        "--rollout-engine": options.engine,
    }
    words = [str(token) for item in flags.items() for token in item]
    if options.engine_url:
        words += ["--rollout-external-engine-addrs", options.engine_url.removeprefix("http://")]
    with user_errors():
        return parse_args([*words, "--debug-rollout-only", *extra])


@contextlib.contextmanager
def serving(args: Args) -> Iterator[int]:
    """The engines of the flags, and what stands before them; yields its port."""
    run_ = open_run(args)
    runtime = create_runtime(args, run_.run_dir, run_.shm_prefix)
    servers = make_servers(args, run_, plan_placement(args, device_count()).engines, runtime)
    policy = args.engine_topology.policy
    service = ModelService(args, policy, servers[policy.name])
    service.fleet.launch()
    try:
        service.fleet.wait_ready()
        yield service.start_routers(run_)[0][1]
    finally:
        run(http_utils.close_session())
        service.close()
        runtime.close()


def rollout_namespace(args: Args, port: int, model: Path) -> Any:
    """What a rollout function gets in a run."""
    config = json.loads((model / "config.json").read_text())
    info = RunInfo(
        run_id="bench",
        run_dir=args.run_dir,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        engine_urls=(f"http://127.0.0.1:{port}",),
        rollout_num_engines=1,
        num_rollout=1,
        vocab_size=config["vocab_size"],
        max_context_len=config["max_position_embeddings"],
    )
    return plugin_args(args, info)


def bare_round(url: str, payloads: list[dict[str, Any]], concurrency: int) -> Round:
    """Posts them all and decodes the answers."""

    async def one(session: aiohttp.ClientSession, slots: asyncio.Semaphore, payload: dict[str, Any]) -> int:
        async with slots, session.post(url, json=payload) as response:
            return len((await response.json())["output_ids"])

    async def everything() -> int:
        slots = asyncio.Semaphore(concurrency)
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return sum(await asyncio.gather(*(one(session, slots, payload) for payload in payloads)))

    return _timed(lambda: run(everything()))


def rollout_round(args: Any) -> Round:
    source = RolloutDataSourceWithBuffer(args)

    def generate() -> int:
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
        assert len(samples) == args.rollout_batch_size * args.n_samples_per_prompt, "samples are missing"
        assert all(len(s.rollout_log_probs) == s.response_length for s in samples), "log-probs are missing"
        return sum(sample.response_length for sample in samples)

    return _timed(generate)


def _timed(work: Any) -> Round:
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = work()
    return Round(tokens, time.perf_counter() - started, time.process_time() - cpu_started)


def make_payloads(args: Any) -> list[dict[str, Any]]:
    """The bodies that the rollout posts."""
    source, state = RolloutDataSourceWithBuffer(args), GenerateState(args)
    payloads = []
    for group in source.get_samples(args.rollout_batch_size):
        for sample in group:
            prepare_prompt(sample, state.tokenizer)
            payloads.append(
                build_request(args, sample, state.sampling_params, args.rollout_max_response_len).to_json()
            )
    return payloads


def compare(args: Any, port: int, options: argparse.Namespace) -> dict[str, Any]:
    base, payloads = f"http://127.0.0.1:{port}", make_payloads(args)
    sides = {
        "bare requests": lambda: bare_round(f"{base}/generate", payloads, options.concurrency),
        "rollout function": lambda: rollout_round(args),
    }
    bare_round(f"{base}/generate", payloads[: options.concurrency], options.concurrency)  # warm-up
    rounds: dict[str, list[Round]] = {side: [] for side in sides}
    for number in range(options.rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for side in order:
            run(flush_cache(base))
            rounds[side].append(sides[side]())
            done = rounds[side][-1]
            print(f"round {number + 1}: {side:17s} {done.tokens} tokens in {done.seconds:.2f} s, "
                  f"{done.rate:.0f} tokens/s", flush=True)  # fmt: skip
    ratios = [ours.rate / bare.rate for bare, ours in zip(*rounds.values(), strict=True)]
    return {
        "rates": {side: [r.rate for r in done] for side, done in rounds.items()},
        "tokens": {side: [r.tokens for r in done] for side, done in rounds.items()},
        "cpu_seconds": {side: [r.cpu_seconds for r in done] for side, done in rounds.items()},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


async def flush_cache(base: str) -> None:
    """The last requests leave the engine a moment after they are answered."""
    for _ in range(40):
        with contextlib.suppress(http_utils.HttpError):
            return await http_utils.post(f"{base}/flush_cache", {}, max_retries=0)
        await asyncio.sleep(0.25)
    raise RuntimeError("the engine does not empty its prefix cache")


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    samples = options.num_prompts * options.samples_per_prompt
    print(f"{options.shape}, {options.engine_url or options.engine}: {samples} samples of "
          f"{options.prompt_tokens} prompt and "
          f"{options.output_tokens} output tokens, {options.concurrency} at a time")  # fmt: skip
    for side, rates in result["rates"].items():
        cpu = statistics.median(result["cpu_seconds"][side])
        print(
            f"{side:17s} {statistics.median(rates):10.0f} tokens/s (median), {cpu:.2f} CPU s of this process"
        )
    low, high = min(result["ratios"]), max(result["ratios"])
    print(
        f"ratio: {result['ratio']:.3f} (median of {len(result['ratios'])}, from {low:.3f} to {high:.3f}); "
        f"goal {GOAL}"
    )


def main() -> int:
    options, extra = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # SGLang can make random weights itself, which saves writing gigabytes.
        dummy = options.engine == "sglang" and options.shape != "tiny" and options.model_path is None
        model = options.model_path or write_model(options.shape, folder / "model", weights=not dummy)
        if dummy:
            extra = ["--sglang-load-format", "dummy", *extra]
        args = read_flags(options, extra, folder, model)
        with serving(args) as port:
            result = compare(rollout_namespace(args, port, model), port, options)
    report(options, result)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"settings": settings, "flags": extra, "goal": GOAL, **result}, indent=2) + "\n"
    )
    return 0 if result["ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
