"""A Ray cluster that does not start, is not there, or grows: `ray.init` and the list of nodes are fakes."""

import concurrent.futures

import pytest

from slime.runtime.placement import Slot
from slime.utils.errors import RunStopped, WorkerDied


@pytest.fixture(scope="module")
def on_ray():
    """Not imported while tests are collected: Ray takes seconds."""
    return pytest.importorskip("slime.runtime.on_ray")


@pytest.fixture
def failing(on_ray, monkeypatch):
    """Makes the first starts fail; gives how often Ray was asked to start."""
    asked = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray.ray, "shutdown", lambda: None)

    def fail_first(count):
        def fake_init(**kwargs):
            asked.append(kwargs)
            if len(asked) <= count:
                raise Exception("The current node timed out during startup.")

        monkeypatch.setattr(on_ray.ray, "init", fake_init)
        return asked

    return fail_first


def test_a_node_that_was_too_slow_is_started_again(on_ray, failing, caplog):
    asked = failing(2)
    on_ray._join_or_start()
    assert len(asked) == 3 and "timed out during startup" in caplog.text


def test_the_reason_is_told_when_it_never_starts(on_ray, failing):
    asked = failing(100)
    with pytest.raises(RunStopped, match="Ray did not start: The current node timed out"):
        on_ray._join_or_start()
    assert len(asked) == on_ray._STARTS


def test_a_cluster_that_is_not_there_is_named_and_not_asked_again(on_ray, failing, monkeypatch):
    asked = failing(100)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(RunStopped, match=r"no Ray cluster answers at RAY_ADDRESS=10\.0\.0\.9:6379"):
        on_ray._join_or_start()
    assert len(asked) == 1


@pytest.mark.parametrize("address", ["ray://10.0.0.9:10001", "http://10.0.0.9:8265"])
def test_an_address_for_clients_is_refused_with_what_to_do(on_ray, failing, monkeypatch, address):
    asked = failing(0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunStopped, match=r"is an address for clients.*ray job submit"):
        on_ray._join_or_start()
    assert not asked


def test_machines_that_join_later_are_waited_for_within_the_deadline(on_ray, monkeypatch, caplog):
    grows = iter([1, 1, 2, 3, 3])
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(on_ray, "_JOINED_S", 0.0)
    monkeypatch.setattr(on_ray, "_alive_nodes", lambda: [{"Resources": {}}] * next(grows, 3))
    runtime = on_ray.RayRuntime.__new__(on_ray.RayRuntime)
    runtime._host_timeout_s = 1e6
    assert runtime.find_machines(3) == 3
    assert "needs 3 machines and the Ray cluster has 1: waiting up to 1e+06 s" in caplog.text
    runtime._host_timeout_s = 0.05
    assert runtime.find_machines(4) == 3, "the plan then names what is missing"
    monkeypatch.delenv("RAY_ADDRESS")
    runtime._host_timeout_s = 1e6
    assert runtime.find_machines(4) == 3, "nobody joins a cluster that this run has started"


def test_the_devices_of_a_cluster_count_and_not_those_of_the_driver(on_ray, monkeypatch):
    """The head of a cluster often has no GPU."""
    nodes = [{"Resources": {"CPU": 4.0}}, *[{"Resources": {"GPU": 8.0}}] * 2]
    monkeypatch.setattr(on_ray, "_alive_nodes", lambda: nodes)
    runtime = on_ray.RayRuntime.__new__(on_ray.RayRuntime)
    runtime._host_timeout_s = 0.0
    assert runtime.gpus_of_machine() == 8
    assert (runtime.find_machines(1), runtime.find_machines(1, 8)) == (3, 2)


def test_a_machine_that_did_not_answer_is_not_asked_when_the_others_go_on(on_ray, monkeypatch):
    """Ray takes a while to notice that a machine is gone, and counts it until then."""
    nodes = [
        {"NodeID": node, "NodeManagerHostname": node, "NodeManagerAddress": address}
        for node, address in (("head", "10.0.0.1"), ("other", "10.0.0.2"))
    ]
    monkeypatch.setattr(on_ray, "_alive_nodes", lambda: nodes)
    monkeypatch.setattr(on_ray, "_answering", lambda asked: ["head"])
    runtime = on_ray.RayRuntime.__new__(on_ray.RayRuntime)
    runtime._driver_node, runtime._nodes = "head", ["head", "other"]
    runtime._spreads, runtime._is_alone = False, False
    runtime._group, runtime._gpu_ids = None, []
    runtime._missing = set()
    assert runtime.other_hosts == ("other (10.0.0.2)",)
    assert [slot and slot.machine for slot in runtime.relocate([Slot(0), Slot(1, machine=1)])] == [0, None]
    assert runtime.other_hosts == ()


def test_a_host_that_came_back_is_another_node_with_its_address(on_ray, monkeypatch):
    runtime = on_ray.RayRuntime.__new__(on_ray.RayRuntime)
    runtime._nodes, slot = ["head", "other"], Slot(1, machine=1, host="10.0.0.2")
    monkeypatch.setattr(on_ray, "_addresses", lambda: {"head": "10.0.0.1", "again": "10.0.0.2"})
    assert runtime._node_of(slot) == "again"
    monkeypatch.setattr(on_ray, "_addresses", lambda: {"head": "10.0.0.1"})
    with pytest.raises(WorkerDied, match=r"the host 10\.0\.0\.2 is not in the Ray cluster"):
        runtime._node_of(slot)


class FakeWorker:
    is_anywhere, ended_here = True, False

    def __init__(self, node):
        self.node_id, self.end = node, concurrent.futures.Future()


def test_objects_that_go_anywhere_are_spread_over_the_hosts_of_the_run_and_those_without_gpus(
    on_ray, monkeypatch
):
    gpus = {"head": 0, "ours": 8, "other-run": 8, "cpu": 0}
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "NodeManagerHostname": name, "Resources": {"GPU": count}}
        for name, count in gpus.items()
    ]
    monkeypatch.setattr(on_ray, "_alive_nodes", lambda: nodes)
    runtime = on_ray.RayRuntime.__new__(on_ray.RayRuntime)
    runtime._driver_node, runtime._nodes, runtime._workers = "head", ["ours"], []
    runtime._spreads, runtime._missing = True, set()
    runtime._machines([((0,), 1)])
    assert set(runtime.other_hosts) == {"ours (ours)", "cpu (cpu)"}, "they are checked before the start"

    def place(count):
        for _ in range(count):
            runtime._workers.append(FakeWorker(runtime._least_used()))
        return [worker.node_id for worker in runtime._workers[-count:]]

    assert place(4) == ["head", "ours", "cpu", "head"]
    runtime._workers[2].end.set_result(None)
    assert place(3) == ["ours", "head", "ours"], "rather not where one has died"
    del nodes[1]
    assert place(1) == ["head"], "its host is lost"
    runtime._spreads, runtime._nodes = False, ["head"]
    runtime._machines([((), 1)])
    assert runtime.other_hosts == () and set(place(3)) == {"head"}
