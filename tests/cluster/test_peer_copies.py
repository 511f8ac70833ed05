"""Copies of the trainer's state in shared memory: two places in turns, and only whole ones count."""

import pytest
from argument_helpers import parse

from slime.cluster.restart.replay import ReplayEntry, ReplayLog, SafeState
from slime.cluster.restart.restore import PeerCopies
from slime.utils.errors import WorkerDied
from slime.utils.files.machine_copies import CopyPlace
from slime.utils.machine import shm


class FakeRanks:
    """One rank, which dies at its next copy where `dies` is set; its processes and what they hold in one."""

    def __init__(self):
        self.copied, self.dies, self.actors = [], False, self

    def copy_place(self, folder):
        return CopyPlace(folder, (0,))

    def call(self, method, *args):
        if method.__name__ == "memory":
            return ["memory"]
        self.copied.append(args[0].folder.name)
        if self.dies:
            raise WorkerDied("trainer-0 was killed by signal 9")
        return [{}]


def test_a_copy_counts_when_it_is_whole_and_the_one_before_stays_until_then():
    args, ranks, done = parse(peer_copies=1), FakeRanks(), []
    replay = ReplayLog(SafeState(args, None, -1))
    copies = PeerCopies(args, "slime-1-x", ranks, replay)
    for step in range(3):
        replay.append(ReplayEntry(f"step {step + 1}", lambda step=step: done.append(step)))
        ranks.dies = step == 2
        if step < 2:
            copies.write(step)
    with pytest.raises(WorkerDied):
        copies.write(2)
    assert ranks.copied == [f"slime-1-x-state-{place}" for place in "aba"]
    assert replay.safe.folder == shm.FOLDER / "slime-1-x-state-b" and replay.safe.rollout_id == 1
    replay.run()
    assert done == [2], "one step is taken again"
    assert replay.fall_back() is replay.safe and replay.safe.folder is None, "the other is half written"
    replay.run()
    assert done == [2, 0, 1, 2]


def test_they_are_made_every_so_many_steps():
    copies = PeerCopies(parse(peer_copies=3), "slime-1-x", FakeRanks(), ReplayLog(SafeState(None, None, -1)))
    assert [step for step in range(7) if copies.are_due(step)] == [2, 5]


def test_folders_of_a_run_go_with_its_segments():
    prefix = shm.make_prefix()
    (shm.FOLDER / f"{prefix}-state-a" / "critic").mkdir(parents=True)
    shm.unlink_prefix(prefix)
    assert shm.list_segments(prefix) == []
