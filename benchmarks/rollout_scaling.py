"""What does a sample cost the framework as a run grows: 1 to 64 engines, 10 to 100,000 samples in flight?

CPU seconds of the process that has the data source, the rollout function, rewards and the balancer before the
engines, per sample; the engines are FakeInstantEngine of rollout_overhead.py, in a process of their own, and
compute nothing. Cells with few samples repeat their rollout. Memory is what the process grows by at its peak,
and what is left of that when the rollout is over. Goal: no cell costs more than 1.3 times the cheapest one
that has at least 1,000 samples in flight, and memory a sample does not grow either.

    python benchmarks/rollout_scaling.py [--engines 1 8 64] [--sizes 10 100 1000 10000 100000] [--pool]

`--pool`: the fully asynchronous rollout, with a batch in flight beside the one that is collected. `--calls`:
also the calls of functions a sample, by a profiler in a second pass. They are the same on any machine, busy
or idle, where the CPU time of few samples is as much a matter of caches that are cold after each wait.
"""

import argparse
import asyncio
import cProfile
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rollout_overhead
from rollout_overhead import NUM_TOKENS, FakeInstantEngine, make_generation, make_run

from slime.arguments import plugin_args
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.engines.balancer import Balancer
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import stop_pool
from slime.utils.async_utils import run
from slime.utils.misc import load_function

GROUP_SIZE = 10
GOAL = 1.3
LEAST_SAMPLES = 3000  # of a measurement: cells with fewer in flight make several rollouts
COMPARED_FROM = 1000  # in flight: the cheapest cell of these is what others are compared with


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    engines: int
    in_flight: int
    cpu_us: float  # a sample
    peak_bytes: float  # a sample in flight
    left_mib: float  # when it was over
    calls: float | None  # of functions, a sample


def serve(ports: Any, count: int) -> None:
    """The process of all engines, each with a port of its own."""
    make_generation()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(FakeInstantEngine, "127.0.0.1", 0, backlog=4096) for _ in range(count)
        ]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(main())


def make_args(folder: Path, options: argparse.Namespace, urls: list[str], port: int, size: int) -> Any:
    flags = {
        "--rollout-batch-size": max(1, size // GROUP_SIZE),
        "--n-samples-per-prompt": GROUP_SIZE,
        "--rollout-max-response-len": NUM_TOKENS,
        "--sglang-server-concurrency": options.concurrency,
        "--custom-rm-path": f"{rollout_overhead.__file__}:reward",
        "--dynamic-sampling-filter-path": rollout_overhead.NONZERO_STD,
    }
    if options.pool:
        flags["--rollout-function-path"] = FULLY_ASYNC_ROLLOUT_FUNCTION
    return plugin_args(*make_run(folder, port, flags, urls, num_rollout=1_000_000))


class PeakMemory:
    """What this process grows by while the block runs."""

    def __enter__(self) -> "PeakMemory":
        self.peak = self.before = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _give_back_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(options: argparse.Namespace, args: Any, engines: int, size: int) -> Cell:
    rounds = max(1, LEAST_SAMPLES // size)
    memory, seconds, samples = _measure_rollouts(options, args, rounds)
    _give_back_memory()
    left = (_resident() - memory.before) / 2**20
    calls = None
    if options.calls:
        with Calls() as counted:
            _, _, samples = _measure_rollouts(options, args, rounds, counted)
        calls = counted.total / samples
    peak = max(0, memory.peak - memory.before) / size
    return Cell(engines, size, seconds / samples * 1e6, peak, left, calls)


class Calls:
    """Calls of functions in the thread that waits for rollouts and in the loop that makes them."""

    def __init__(self) -> None:
        self._profiles = cProfile.Profile(), cProfile.Profile()

    def __enter__(self) -> "Calls":
        return self

    def begin(self) -> None:
        self._profiles[0].enable()
        run(_async(self._profiles[1].enable))

    def __exit__(self, *_: object) -> None:
        self._profiles[0].disable()
        run(_async(self._profiles[1].disable))

    @property
    def total(self) -> int:
        return sum(row.callcount for profile in self._profiles for row in profile.getstats())


async def _async(call: Callable[[], object]) -> None:
    call()


def _measure_rollouts(
    options: argparse.Namespace, args: Any, rounds: int, calls: Calls | None = None
) -> tuple[PeakMemory, float, int]:
    """Memory, CPU seconds and the number of samples."""
    function, source = load_function(args.rollout_function_path), RolloutDataSourceWithBuffer(args)

    def rollout(number: int) -> int:
        return len(call_rollout_fn(function, args, number, source, evaluation=False).samples) * GROUP_SIZE

    rollout(0)  # connections are made, tokens of the prompts are known
    _give_back_memory()
    with PeakMemory() as memory:
        if calls is not None:
            calls.begin()
        began = time.process_time()
        samples = sum(rollout(1 + number) for number in range(rounds))
        seconds = time.process_time() - began
    if options.pool:
        stop_pool(source)
    return memory, seconds, samples


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 8, 64])
    add("--sizes", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000], help="samples in flight")
    add("--rounds", type=int, default=1, help="of all cells; medians are taken")
    add("--concurrency", type=int, default=64, help="requests at an engine")
    add("--pool", action="store_true")
    add("--calls", action="store_true")
    add("--json", type=Path, default=Path("benchmarks/results/rollout_scaling.json"))
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(there, max(options.engines)), daemon=True)
    server.start()
    urls = [f"http://127.0.0.1:{port}" for port in here.recv()]
    found: dict[tuple[int, int], list[Cell]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for engines in options.engines:
                balancer = Balancer(urls[:engines], no_engine_timeout_s=60.0)
                port = run(balancer.start())
                for size in options.sizes:
                    args = make_args(Path(folder), options, urls[:engines], port, size)
                    cell = measure(options, args, engines, size)
                    found.setdefault((engines, size), []).append(cell)
                    print(
                        f"{engines:3} engines, {size:6} in flight: {cell.cpu_us:6.0f} us of CPU a sample, "
                        f"{cell.peak_bytes / 1024:7.1f} KiB at the peak, {cell.left_mib:6.1f} MiB left"
                        + (f", {cell.calls:6.0f} calls" if cell.calls is not None else ""),
                        flush=True,
                    )
                run(balancer.stop())
    server.terminate()
    return report(options, found)


def report(options: argparse.Namespace, found: dict[tuple[int, int], list[Cell]]) -> int:
    cost = {key: statistics.median(cell.cpu_us for cell in cells) for key, cells in found.items()}
    large = [us for (_, size), us in cost.items() if size >= COMPARED_FROM] or list(cost.values())
    ratios = {key: us / min(large) for key, us in cost.items()}
    worst = max(ratios, key=lambda key: ratios[key])
    print(
        f"the dearest cell ({worst[0]} engines, {worst[1]} in flight) costs {ratios[worst]:.2f} times the "
        f"cheapest; goal {GOAL}"
    )
    counts = {key: cells[0].calls for key, cells in found.items() if cells[0].calls is not None}
    if counts:
        most = max(counts, key=lambda key: counts[key])
        print(
            f"most calls a sample ({most[0]} engines, {most[1]} in flight): "
            f"{counts[most] / min(counts.values()):.2f} times the fewest"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(cell) for cells in found.values() for cell in cells]
    about = {"pool": options.pool, "machine_load": os.getloadavg()[0], "goal": GOAL, "worst": ratios[worst]}
    options.json.write_text(json.dumps({**about, "cells": rows}, indent=2) + "\n")
    return 0 if ratios[worst] <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
