"""Copies of the trainer's state in shared memory: two places in turns, and only whole ones count."""

import pytest
from argument_helpers import parse

from slime.cluster.restart.peer_copies import PeerCopies
from slime.cluster.restart.redo import Deed, Redo, SafeState
from slime.runtime.base import WorkerDied
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
    redo = Redo(SafeState(args, None, -1))
    copies = PeerCopies(args, "slime-1-x", ranks, redo)
    for step in range(3):
        redo.note(Deed(f"step {step + 1}", lambda step=step: done.append(step)))
        ranks.dies = step == 2
        if step < 2:
            copies.write(step)
    with pytest.raises(WorkerDied):
        copies.write(2)
    assert ranks.copied == [f"slime-1-x-state-{place}" for place in "aba"]
    assert redo.safe.folder == shm.FOLDER / "slime-1-x-state-b" and redo.safe.rollout_id == 1
    redo.run()
    assert done == [2], "one step is taken again"
    assert redo.fall_back() is redo.safe and redo.safe.folder is None, "the other one was half written over"
    redo.run()
    assert done == [2, 0, 1, 2]


def test_they_are_made_every_so_many_steps():
    copies = PeerCopies(parse(peer_copies=3), "slime-1-x", FakeRanks(), Redo(SafeState(None, None, -1)))
    assert [step for step in range(7) if copies.are_due(step)] == [2, 5]


def test_folders_of_a_run_go_with_its_segments():
    prefix = shm.make_prefix()
    (shm.FOLDER / f"{prefix}-state-a" / "critic").mkdir(parents=True)
    shm.unlink_prefix(prefix)
    assert shm.list_segments(prefix) == []
