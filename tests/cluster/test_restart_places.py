"""Where a trainer that was lost starts again."""

import pytest
from argument_helpers import parse

from slime.cluster.restart.restore import find_slots
from slime.runtime.placement import Slot
from slime.utils.errors import RunStopped


class FakeRuntime:
    """Of which machines are left at each question."""

    def __init__(self, *left):
        self._left = list(left)

    def relocate(self, slots):
        left = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        return [slot if slot.machine in left else None for slot in slots]


SLOTS = tuple(Slot(i, machine=i // 2) for i in range(4))


def test_all_machines_are_there():
    assert find_slots(parse(), FakeRuntime({0, 1}), SLOTS) == SLOTS


def test_an_elastic_trainer_takes_whole_replicas():
    assert find_slots(parse(elastic=True), FakeRuntime({1}), SLOTS) == (
        Slot(0, machine=1),
        Slot(1, machine=1),
    )
    three = (*SLOTS[:2], Slot(2, machine=1), Slot(3, machine=2))
    args = parse(elastic=True, tensor_model_parallel_size=2, actor_num_gpus_per_node=2)
    assert len(find_slots(args, FakeRuntime({0, 1}), three)) == 2
    args = parse(elastic=True, train_backend="fsdp", fsdp_shard_size=2, actor_num_gpus_per_node=2)
    assert len(find_slots(args, FakeRuntime({0, 1}), three)) == 2


def test_it_waits_for_a_machine(monkeypatch, caplog):
    monkeypatch.setattr("slime.cluster.restart.restore._POLL_S", 0.01)
    assert find_slots(parse(), FakeRuntime({0}, {0}, {0, 1}), SLOTS) == SLOTS
    assert caplog.text.count("needs 4 ranks on 2 machine(s)") == 1


def test_then_it_ends_with_what_it_needs():
    with pytest.raises(
        RunStopped, match=r"has 1 machine\(s\) for 2, also after --timeouts restart-wait=0: .*--elastic"
    ):
        find_slots(parse(timeouts="restart-wait=0"), FakeRuntime({0}), SLOTS)
