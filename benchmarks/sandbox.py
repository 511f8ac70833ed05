"""What a sandbox costs: a prewarmed box, a cold one, a command in it; beside the same command without a box.

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --isolation namespaces --rounds 50

Limits: a prewarmed box is handed out in at most 30 ms, `true` runs in at most 15 ms (medians). The machine
should have nothing else to do; the reference in the same table says what it gave at the time.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from slime.agent.sandbox import BoxPool, LocalSandbox
from slime.agent.sandbox.isolation import KINDS, best_isolation

LIMITS_MS = {"prewarmed box": 30.0, "exec true": 15.0}


async def timed(rounds: int, action: Callable[[], Awaitable[object]]) -> list[float]:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        await action()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


async def measure(isolation: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}

    async def plain() -> None:
        process = await asyncio.create_subprocess_exec("bash", "-c", "true", stdin=subprocess.DEVNULL)
        await process.wait()

    async def cold() -> None:
        async with LocalSandbox(isolation=isolation):
            pass

    found["bash -c true, no box"] = await timed(rounds, plain)
    found["cold box, start and end"] = await timed(rounds, cold)
    taken: list[float] = []
    async with BoxPool(lambda: LocalSandbox(isolation=isolation), num_ready=4) as pool:
        for _ in range(rounds):
            await pool.warm()
            begin = time.perf_counter()
            async with pool.box():
                taken.append((time.perf_counter() - begin) * 1e3)
    found["prewarmed box"] = taken
    async with LocalSandbox(isolation=isolation) as box:
        found["exec true"] = await timed(rounds, lambda: box.exec("true", check=True))
        found["exec python3 -c pass"] = await timed(
            rounds, lambda: box.exec("python3 -I -c pass", check=True)
        )
        found["write_file 1 KB"] = await timed(rounds, lambda: box.write_file("a", "x" * 1024))
        found["read_file 1 KB"] = await timed(rounds, lambda: box.read_file("a"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isolation", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    isolation = options.isolation or best_isolation()
    found = asyncio.run(measure(isolation, options.rounds))
    print(f"{isolation}, {options.rounds} rounds, milliseconds")
    print(f"{'':26} {'median':>8} {'90 %':>8} {'limit':>8}")
    late = []
    for name, times in found.items():
        median, high = statistics.median(times), sorted(times)[int(0.9 * (len(times) - 1))]
        limit = LIMITS_MS.get(name)
        print(f"{name:26} {median:8.2f} {high:8.2f} {limit if limit is not None else '':>8}")
        late += [name] if limit is not None and median > limit else []
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"isolation": isolation, "ms": found}, file)
    if late:
        print(f"over the limit: {', '.join(late)}")
    return bool(late)


if __name__ == "__main__":
    raise SystemExit(main())
