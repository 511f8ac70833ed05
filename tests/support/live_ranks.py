"""Starts the trainer ranks of `live_rank.py` together and returns what each reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE_S

from slime.utils.machine.ports import hold_port

SCRIPT = Path(__file__).with_name("live_rank.py")


def push_from_ranks(world: int, job: dict, timeout_s: float = PATIENCE_S) -> list[dict]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(world), str(port), json.dumps(job)],
                env=env,
                cwd=SCRIPT.parents[1],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        try:
            ends = [rank.communicate(timeout=timeout_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]
