"""What does the default rollout function cost beside the bare HTTP it needs?

CPU seconds of this process per sample, with 1k and 10k samples in flight: the whole path (tokenise, request,
parse, sample, reward, filter) against a bare aiohttp client that posts the same requests and decodes the
JSON. Both talk to FakeInstantEngine, a process of its own that computes nothing and answers 64 tokens at
once. They take turns, and every other round begins with the rollout, so that other work on the machine slows
both alike; the ratio is the median of the rounds, printed with the lowest and the highest one. Memory is what
Python holds at its peak per sample in flight, in a pass of its own.

    python benchmarks/rollout_overhead.py [--sizes 1000 10000] [--rounds 6] [--json out.json]
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from slime.arguments import Args, RunInfo, parse_args, plugin_args
from slime.cli.quickstart import tiny
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generation import generate_request
from slime.rollout.generation.generate_request import build_request, prepare_prompt
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.machine.garbage import searching_new_only

NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
NUM_TOKENS = 64
GROUP_SIZE = 8
TARGET_RATIO = 4.0


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Unlike within a group, so that the filter keeps all of them."""
    return float(sample.index % 2)


class FakeInstantEngine(asyncio.Protocol):
    """One connection of a server that reads each request whole and answers the same 64 tokens, to a group
    with an event for each member. It computes nothing.
    """

    answer, generation = b"", b""
    open_now = most_open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.rest = transport, b""
        kind = FakeInstantEngine
        kind.open_now += 1
        kind.most_open = max(kind.most_open, kind.open_now)

    def connection_lost(self, error: Exception | None) -> None:
        FakeInstantEngine.open_now -= 1

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            head = self.rest[:end].lower()
            if head.startswith(b"get"):
                length, answer = 0, _http(json.dumps({"most_open": FakeInstantEngine.most_open}).encode())
                FakeInstantEngine.most_open = FakeInstantEngine.open_now
            else:
                length, answer = int(head.partition(b"content-length:")[2].split(b"\r\n")[0]), self.answer
            if len(self.rest) < end + 4 + length:
                return
            if (body := self.rest[end + 4 : end + 4 + length]).startswith(b'{"input_ids": [['):
                answer = self._events(len(json.loads(body)["rid"]))
            self.rest = self.rest[end + 4 + length :]
            self.transport.write(answer)

    def _events(self, count: int) -> bytes:
        events = (b'data: {"index": %d, %s\n\n' % (place, self.generation[1:]) for place in range(count))
        return _http(b"".join(events) + b"data: [DONE]\n\n", b"text/event-stream")


def _http(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    return head + body


def make_generation() -> None:
    """What every engine of this process answers."""
    ids = [10 + i % 50 for i in range(NUM_TOKENS)]
    meta = {
        "id": "x" * 32,
        "finish_reason": {"type": "length", "length": NUM_TOKENS},
        "prompt_tokens": 40,
        "completion_tokens": NUM_TOKENS,
        "cached_tokens": 0,
        "weight_version": "run:1",
        "output_token_logprobs": [[-0.123456789 - i / 1000, token, None] for i, token in enumerate(ids)],
    }
    generation = json.dumps({"text": "answer " * 20, "output_ids": ids, "meta_info": meta}).encode()
    FakeInstantEngine.generation, FakeInstantEngine.answer = generation, _http(generation)


def serve(port_pipe: Any) -> None:
    """The server process."""
    make_generation()

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(
            FakeInstantEngine, "127.0.0.1", 0, backlog=2048
        )
        port_pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def make_run(
    folder: Path, port: int, flags: dict[str, Any], urls: Sequence[str] = (), **facts: Any
) -> tuple[Args, RunInfo]:
    """A run of a tiny model with `flags` and requests to `port`; `facts` replace some of its RunInfo."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        rows = [{"input": f"{i} + {i + 1} = ", "label": str(2 * i + 1)} for i in range(4096)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tiny.build_tokenizer().save_pretrained(folder)
        tiny.build_config().save_pretrained(folder)
    common = {"--hf-checkpoint": folder, "--prompt-data": prompts, "--label-key": "label", "--num-rollout": 1}
    args = parse_args([str(token) for item in (common | flags).items() for token in item])
    urls = tuple(urls) or (f"http://127.0.0.1:{port}",)
    known = {"num_rollout": 1, "vocab_size": 100_000, "max_context_len": 4096}
    info = RunInfo(
        run_id="bench",
        run_dir=str(folder / "run"),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        engine_urls=urls,
        rollout_num_engines=len(urls),
        **(known | facts),
    )
    return args, info


def make_args(folder: Path, port: int, num_samples: int, concurrency: int) -> Any:
    """The namespace that a rollout function gets."""
    flags = {
        "--rollout-batch-size": num_samples // GROUP_SIZE,
        "--n-samples-per-prompt": GROUP_SIZE,
        "--rollout-max-response-len": NUM_TOKENS,
        "--sglang-server-concurrency": concurrency,
        "--custom-rm-path": f"{__file__}:reward",
        "--dynamic-sampling-filter-path": NONZERO_STD,
    }
    return plugin_args(*make_run(folder, port, flags))


def measure_rollout(args: Any) -> float:
    """CPU seconds of one rollout."""
    source = RolloutDataSourceWithBuffer(args)
    generate_request._encode.cache_clear()  # earlier rounds had the same prompts, a run has new ones
    gc.collect()
    started = time.process_time()
    output = generate_rollout(args, 0, source)
    seconds = time.process_time() - started
    assert len(output.samples) == args.rollout_batch_size
    return seconds


def make_payloads(args: Any) -> list[dict[str, Any]]:
    """The bodies that the rollout would post."""
    source, state = RolloutDataSourceWithBuffer(args), GenerateState(args)
    payloads = []
    for group in source.get_samples(args.rollout_batch_size):
        for sample in group:
            prepare_prompt(sample, state.tokenizer)
            payloads.append(build_request(args, sample, state.sampling_params, NUM_TOKENS).to_json())
    return payloads


def measure_bare(url: str, payloads: list[dict[str, Any]], concurrency: int) -> float:
    """CPU seconds of posting them all and decoding the answers."""

    async def one(session: aiohttp.ClientSession, slots: asyncio.Semaphore, payload: dict[str, Any]) -> int:
        async with slots, session.post(url, json=payload) as response:
            return len((await response.json())["output_ids"])

    async def everything() -> None:
        slots = asyncio.Semaphore(concurrency)
        connector = aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(connector=connector) as session:
            assert set(await asyncio.gather(*(one(session, slots, payload) for payload in payloads))) == {
                NUM_TOKENS
            }

    gc.collect()
    started = time.process_time()
    run(everything())
    return time.process_time() - started


def measure_memory(args: Any) -> float:
    """Bytes at the peak of a rollout per sample of it."""
    source = RolloutDataSourceWithBuffer(args)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    generate_rollout(args, 0, source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak - before) / (args.rollout_batch_size * GROUP_SIZE)


def measure(size: int, args: Any, url: str, rounds: int, concurrency: int) -> dict[str, Any]:
    payloads = make_payloads(args)
    measure_bare(url, payloads[:200], concurrency)
    measure_rollout(args)  # what is loaded and remembered at first use costs a run nothing later
    bare, ours, connections = [], [], 0
    for number in range(rounds):
        for is_ours in (number % 2 == 1, number % 2 == 0):
            if is_ours:
                run(_most_open(url))  # counts anew from here
                ours.append(measure_rollout(args))
                connections = run(_most_open(url))
            else:
                bare.append(measure_bare(url, payloads, concurrency))
    ratios = sorted(rollout / plain for plain, rollout in zip(bare, ours, strict=True))
    return {
        "in_flight": size,
        "bare_us": statistics.median(bare) / size * 1e6,
        "rollout_us": statistics.median(ours) / size * 1e6,
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "connections": connections,
        "bytes_per_sample": measure_memory(args),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000], help="samples in flight")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=512, help="connections, on both sides")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rollout_overhead.json"))
    options = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    with tempfile.TemporaryDirectory() as folder, searching_new_only():  # as in the driver of a run
        rows = []
        for size in options.sizes:
            args = make_args(Path(folder), port, size, options.concurrency)
            url = f"http://127.0.0.1:{port}/generate"
            rows.append(measure(size, args, url, options.rounds, options.concurrency))
            line = "{in_flight:6d} in flight: bare {bare_us:6.0f} us, rollout {rollout_us:6.0f} us a sample"
            line += ", ratio {ratio:.2f} ({lowest:.2f} to {highest:.2f}), {connections} connections"
            line += ", {bytes_per_sample:.0f} bytes a sample"
            print(line.format(**rows[-1]), flush=True)
    server.terminate()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"engine": "FakeInstantEngine", "target_ratio": TARGET_RATIO, "rows": rows}
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["ratio"] <= TARGET_RATIO for row in rows) else 1


async def _most_open(url: str) -> int:
    """The most connections since this was last asked."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.json())["most_open"] - 1


if __name__ == "__main__":
    sys.exit(main())
