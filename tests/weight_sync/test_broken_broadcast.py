"""A member of a broadcast group dies or hangs: the others get an error within seconds, and live on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from devices import DEVICE
from patience import LONG_S, PATIENCE_S

import slime
from slime.utils.machine.process_groups import LOOPBACK, open_store
from slime.utils.machine.shared_gpu import nccl_on_one_gpu

SCRIPT = Path(__file__).parents[1] / "support" / "group_rank.py"
MANY = 1 << 24  # values: more than the connections take before a member reads them


class Members:
    """Processes that broadcast when they are told to."""

    def __init__(self, count: int, deadline_s: float = PATIENCE_S):
        self._stores, root = [], str(Path(slime.__file__).parents[1])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(deadline_s)],
                env=env if DEVICE == "cpu" else env | nccl_on_one_gpu(f"rank-{rank}"),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(count)
        ]
        assert self.hear(range(count)) == [{"ready": True}] * count

    def tell(self, ranks: range, **job) -> None:
        for rank in ranks:
            self.processes[rank].stdin.write(json.dumps(job) + "\n")
            self.processes[rank].stdin.flush()

    def hear(self, ranks: range) -> list[dict]:
        """Return the next line of each; empty of one that has ended."""
        return [json.loads(self.processes[rank].stdout.readline() or "{}") for rank in ranks]

    def join(self, ranks: range, name: str) -> None:
        store = open_store(LOOPBACK, len(ranks))
        self._stores.append(store)
        self.tell(ranks, join=[store.port, len(ranks), name])
        assert self.hear(ranks) == [{"joined": True}] * len(ranks)

    def begin(self, ranks: range, **job) -> None:
        self.tell(ranks, **job)
        assert self.hear(ranks) == [{"begun": True}] * len(ranks)

    def share(self, ranks: range) -> list[dict]:
        self.begin(ranks, broadcast=5)
        return self.hear(ranks)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def members():
    made = Members(3)
    yield made
    made.stop()


SHARED = {"means": [1.0, 2.0]}


@pytest.mark.parametrize("cause", ["killed", "over"])
def test_members_of_a_broken_broadcast_get_an_error_in_seconds_and_can_join_another_group(
    members, tmp_path, cause
):
    everyone, others = range(3), range(2)
    members.join(everyone, "first")
    assert members.share(everyone) == [SHARED] * 3
    members.processes[2].send_signal(signal.SIGSTOP)
    over = tmp_path / "over"
    members.begin(others, broadcast=MANY, over=str(over))
    if cause == "killed":
        members.processes[2].kill()
    else:
        over.touch()
    [sender] = members.hear(range(1))
    over.touch()  # as the sender tells the engines, which may not notice that it has left
    [other] = members.hear(range(1, 2))
    assert "error" in sender and sender["seconds"] < LONG_S
    assert sender["alive"] and (other == SHARED or other["alive"]), "the other may have got all before"
    members.join(others, "second")
    assert members.share(others) == [SHARED] * 2


def test_a_member_that_never_takes_part_is_given_up_at_the_deadline():
    """It hangs before the first broadcast, in which NCCL connects the ranks."""
    members = Members(2, deadline_s=3.0)
    try:
        members.join(range(2), "first")
        members.processes[1].send_signal(signal.SIGSTOP)
        members.begin(range(1), broadcast=MANY)
        [answer] = members.hear(range(1))
        assert "Timed out" in answer["error"] and answer["alive"]
    finally:
        members.stop()
