"""How long until the death of a process is told, with the last lines of its log?

    python benchmarks/death_notice.py [--kills 20] [--runtimes local ray]

A worker is killed by SIGKILL while nobody waits for it; measured are the seconds until `Runtime.failure` has
the error, which is what every wait of a run also looks at. Goal: 2 s.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from slime.runtime.base import Runtime, WorkerSpec
from slime.runtime.local import LocalRuntime
from slime.utils.machine import shm

GOAL_S = 2.0


class Worker:
    """Lives in the process that is killed."""

    def pid(self, words: str) -> int:
        print(words, flush=True)
        return os.getpid()


def make(kind: str, folder: Path) -> Runtime:
    if kind == "local":
        return LocalRuntime(folder, shm.make_prefix())
    from slime.runtime.on_ray import RayRuntime

    return RayRuntime(folder)


def notice_s(runtime: Runtime, number: int) -> float:
    from death_notice import Worker  # by a name that another process can import

    words = f"last words of {number}"
    worker = runtime.spawn(WorkerSpec(f"worker-{number}"), Worker)
    pid = worker.call(Worker.pid, words).result()
    time.sleep(0.037 * number)  # at another place between two heartbeats each time
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    error = runtime.failure.exception(60)
    taken = time.monotonic() - killed
    assert words in str(error), error
    worker.kill()
    runtime.forget_failure()
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runtimes", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    options = parser.parse_args()
    worst = 0.0
    for kind in options.runtimes:
        with tempfile.TemporaryDirectory() as folder:
            runtime = make(kind, Path(folder))
            try:
                taken = [notice_s(runtime, number) for number in range(options.kills)]
            finally:
                runtime.close()
        worst = max(worst, *taken)
        print(f"{kind:6s} {len(taken)} kills: median {1e3 * statistics.median(taken):.1f} ms, "
              f"longest {1e3 * max(taken):.1f} ms (load {os.getloadavg()[0]:.1f})", flush=True)  # fmt: skip
    return 0 if worst <= GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
