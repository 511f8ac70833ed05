"""Starts the trainer ranks of `stage_rank.py` and has them push together."""

import json
import os
import subprocess
import sys
from pathlib import Path

from devices import DEVICE
from stage_rank import DEADLINE_S

from slime.utils.http_utils import token_of
from slime.utils.machine.ports import hold_port
from slime.utils.machine.shared_gpu import nccl_on_one_gpu

SCRIPT = Path(__file__).with_name("stage_rank.py")


class StageRanks:
    """One process per rank; a push is told to all of them, and each answers."""

    def __init__(self, num_stages: int, world: int, deadline_s: int = DEADLINE_S):
        self._held = hold_port("127.0.0.1")
        port = self._held.getsockname()[1]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, (rank, num_stages, world, port, deadline_s))],
                env=env if DEVICE == "cpu" else env | nccl_on_one_gpu(f"stage-{rank}"),
                cwd=SCRIPT.parents[1],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        for rank in range(world):
            assert self.hear(rank) == {"ready": True}

    def begin(self, targets, version: str, model: Path, **more) -> None:
        told = [(t.url, t.life, t.parallel_updates, token_of(t.url)) for t in targets]
        job = {"version": version, "targets": told, "model": str(model), **more}
        for rank in range(len(self.processes)):
            self.tell(rank, job)

    def tell(self, rank: int, what: dict) -> None:
        self.processes[rank].stdin.write(json.dumps(what) + "\n")
        self.processes[rank].stdin.flush()

    def hear(self, rank: int) -> dict:
        """The next answer; empty when the process has ended."""
        return json.loads(self.processes[rank].stdout.readline() or "{}")

    def hear_all(self) -> list[dict]:
        return [self.hear(rank) for rank in range(len(self.processes))]

    def push(self, targets, version: str, model: Path, **more) -> list[dict]:
        self.begin(targets, version, model, **more)
        return self.hear_all()

    def stop(self) -> None:
        self._held.close()
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
            process.stdout.close()
