"""What do long responses cost the driver, and how much faster do several rollout workers read them?

Fake engines answer each group with prepared responses of many tokens at once, so that reading them is all the
work there is. Each case of --workers makes the same rollout; one worker is the driver itself. Reported are
seconds, CPU seconds of the driver, what its memory grows by at its peak, and both once the batch for the
trainer is made from the samples. Goals: with four workers the driver needs at most 10 s of CPU and 2 GiB for
4,096 responses of 32,768 tokens, and the rollout takes a third of the time of one worker.

    python benchmarks/rollout_workers.py --workers 4                          # CPU and memory, on 16 cores
    python benchmarks/rollout_workers.py --workers 1 2 4 --responses 1024     # the speed-up, on 16 cores
    python benchmarks/rollout_workers.py --workers 1 2 --responses 256        # on two cores

`--balancer`: each engine has an address of its own, and slime's load balancer spreads the requests.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_overhead import FakeInstantEngine, _http, make_run
from rollout_scaling import PeakMemory, _give_back_memory

from slime.arguments import plugin_args
from slime.batch.convert import samples_to_batch
from slime.cluster.rollout_workers import RolloutWorkers
from slime.engines.balancer import Balancer
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.workers import current
from slime.runtime.local import LocalRuntime
from slime.utils.async_utils import run

GROUP_SIZE = 8
MOST_CPU_S, MOST_GIB, LEAST_SPEEDUP = 10.0, 2.0, 3.0


@dataclass(frozen=True)
class Case:
    """One measurement; the batch is made after the rollout, and its cost is added."""

    workers: int
    seconds: float
    driver_cpu_s: float
    driver_peak_gib: float
    with_batch_cpu_s: float
    with_batch_gib: float


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Read the text, as rewards do; samples of a group differ."""
    return float(sample.response.count("answer") + sample.index % 2)


def serve(port: int, num_tokens: int, ready: Any) -> None:
    """An engine process. Several on one `port` share its connections; 0: each has a port of its own."""
    ids = [10 + i % 50 for i in range(num_tokens)]
    meta = {
        "id": "x" * 32,
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 10,
        "completion_tokens": num_tokens,
        "weight_version": "run:1",
        "output_token_logprobs": [[-(i % 1000 + 1) / 1024, token, None] for i, token in enumerate(ids)],
    }
    text = "answer!!" * (num_tokens // 2)  # four characters to a token
    generation = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()
    FakeInstantEngine.generation, FakeInstantEngine.answer = generation, _http(generation)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(FakeInstantEngine, "127.0.0.1", port, reuse_port=True)
        ready.send((len(generation), server.sockets[0].getsockname()[1]))
        await server.serve_forever()

    asyncio.run(main())


def measure(folder: Path, options: argparse.Namespace, ports: list[int], workers: int) -> Case:
    flags = {
        "--rollout-batch-size": options.responses // GROUP_SIZE,
        "--n-samples-per-prompt": GROUP_SIZE,
        "--rollout-max-response-len": options.tokens,
        "--sglang-server-concurrency": options.concurrency,
        "--custom-rm-path": f"{Path(__file__).resolve()}:reward",
        "--rollout-workers": workers,
    }
    urls, balancers = [f"http://127.0.0.1:{port}" for port in ports], []
    if options.balancer:
        balancers = [Balancer(urls, no_engine_timeout_s=60.0)]
        ports = [run(balancers[0].start())]
    args, info = make_run(folder, ports[0], flags, urls, max_context_len=options.tokens + 1000)
    namespace = plugin_args(args, info)
    runtime = LocalRuntime(folder / "run", f"bench-{os.getpid()}-")
    shared = dict(zip([("127.0.0.1", ports[0])], balancers, strict=False))
    group = RolloutWorkers(args, info, runtime, None, shared) if workers > 1 else None
    current.use(group)
    try:
        source = RolloutDataSourceWithBuffer(namespace)
        _give_back_memory()
        with PeakMemory() as memory:
            started, cpu = time.monotonic(), time.process_time()
            output = call_rollout_fn(generate_rollout, namespace, 0, source, evaluation=False)
            seconds, used = time.monotonic() - started, time.process_time() - cpu
            peak = memory.peak
            batch = samples_to_batch(namespace, output.samples, engine_version="run:1")
            with_batch = time.process_time() - cpu
        assert len(batch["tokens"]) == options.responses
    finally:
        current.use(None)
        if group is not None:
            group.close()
        runtime.close()
        for balancer in balancers:
            run(balancer.stop())
    gib = [(value - memory.before) / 2**30 for value in (peak, memory.peak)]
    return Case(workers, seconds, used, gib[0], with_batch, gib[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--responses", type=int, default=4096)
    add("--tokens", type=int, default=32_768, help="of a response")
    add("--engines", type=int, default=4, help="processes of fake engines")
    add("--concurrency", type=int, default=256, help="requests in flight")
    add("--balancer", action="store_true", help="put slime's load balancer in front of the engines")
    add("--json", type=Path, default=Path("benchmarks/results/rollout_workers.json"))
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = 0 if options.balancer else held.getsockname()[1]
        here, there = spawn.Pipe()
        engines = [
            spawn.Process(target=serve, args=(port, options.tokens, there), daemon=True)
            for _ in range(options.engines)
        ]
        for engine in engines:
            engine.start()
        served = [here.recv() for _ in engines]
        size, ports = served[0][0], sorted({port for _, port in served})
        print(f"{options.responses} responses of {options.tokens} tokens, {size / 2**20:.2f} MiB each")
        cases = []
        for workers in options.workers:
            case = measure(Path(folder), options, ports, workers)
            cases.append(case)
            print(
                f"{workers} workers: {case.seconds:6.1f} s; driver {case.driver_cpu_s:5.1f} s of CPU, "
                f"{case.driver_peak_gib:5.2f} GiB; with the batch {case.with_batch_cpu_s:5.1f} s, "
                f"{case.with_batch_gib:5.2f} GiB",
                flush=True,
            )
        for engine in engines:
            engine.terminate()
        for engine in engines:  # their connections end while this process can still take note of it
            engine.join()
    return report(options, cases)


def report(options: argparse.Namespace, cases: list[Case]) -> int:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"responses": options.responses, "tokens": options.tokens, "cores": os.cpu_count()}
    options.json.write_text(json.dumps({**about, "cases": [asdict(case) for case in cases]}, indent=2) + "\n")
    by_workers = {case.workers: case for case in cases}
    one, four = by_workers.get(1), by_workers.get(4)
    if four is None:
        return 0
    met = four.driver_cpu_s <= MOST_CPU_S and four.driver_peak_gib <= MOST_GIB
    print(
        f"four workers: driver {four.driver_cpu_s:.1f} s of CPU (goal {MOST_CPU_S:g}), "
        f"{four.driver_peak_gib:.2f} GiB (goal {MOST_GIB:g})"
    )
    if one is not None:
        speedup = one.seconds / four.seconds
        met = met and speedup >= LEAST_SPEEDUP
        print(f"{speedup:.2f} times as fast as one worker (goal {LEAST_SPEEDUP:g})")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
