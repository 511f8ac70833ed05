"""One conformance suite for every runtime: handles, lanes, failures, references, and an end that leaves nothing."""

import os
import signal
import threading
import time

import psutil
import pytest

from slime.cluster.local_runtime import LocalRuntime
from slime.cluster.placement import Slot
from slime.cluster.runtime import CONTROL, WorkerDied, WorkerSpec, fetch, gather
from slime.utils import shm, waits


class Target:
    """Lives in a worker."""

    def __init__(self, base):
        self.base = base
        self.event = threading.Event()

    def add(self, x):
        return self.base + x

    def pid(self):
        return os.getpid()

    def env(self, name):
        return os.environ.get(name)

    def fail(self):
        raise ValueError("--flag 3: too small")

    def wait(self):
        self.event.wait(30)
        return "woken"

    def wake(self):
        self.event.set()

    def total(self, ref):
        return sum(fetch(ref))

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module", params=["local", "ray"])
def runtime(request, tmp_path_factory):
    prefix = shm.make_prefix()
    if request.param == "local":
        made = LocalRuntime(tmp_path_factory.mktemp("run"), prefix)
    else:
        ray_runtime = pytest.importorskip("slime.cluster.ray_runtime")
        made = ray_runtime.RayRuntime(None, tmp_path_factory.mktemp("run"))
    yield made
    made.close()
    made.close()
    assert shm.list_segments(prefix) == []


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "near"])
def handle(request, runtime):
    return runtime.spawn(Target, 10, spec=WorkerSpec(f"target-{request.param}", near_driver=request.param))


def test_a_file_in_the_working_folder_does_not_shadow_what_a_worker_imports(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('the stranger ran')\n")
    monkeypatch.chdir(tmp_path)
    prefix = shm.make_prefix()
    runtime = LocalRuntime(tmp_path / "run", prefix)
    try:
        assert runtime.spawn(Target, 10, spec=WorkerSpec("target")).call("add", 5).result(60) == 15
    finally:
        runtime.close()


def test_a_call_returns_its_value(handle):
    assert handle.call("add", 5).result(60) == 15


def test_an_exception_keeps_its_type_and_message(handle):
    with pytest.raises(ValueError, match="--flag 3: too small"):
        handle.call("fail").result(60)


def test_the_control_lane_does_not_queue_behind_work(handle):
    waiting = handle.call("wait")
    handle.call("wake", lane=CONTROL).result(60)
    assert waiting.result(60) == "woken"


def test_an_overdue_call_is_a_named_error(runtime):
    slow = runtime.spawn(Target, 0, spec=WorkerSpec("slow"))
    assert slow.call("add", 1).result(60) == 1
    with pytest.raises(waits.WaitTimeout, match=r"slow\.wait: not done after 0\.2"):
        slow.call("wait").result(0.2)
    slow.kill()


def test_references_reach_workers(runtime, handle):
    ref = runtime.put(list(range(100)))
    assert handle.call("total", ref).result(60) == 4950
    runtime.drop(ref)


def test_a_dead_worker_fails_its_calls_with_the_cause(runtime):
    doomed = runtime.spawn(Target, 0, spec=WorkerSpec("doomed"))
    doomed.call("add", 1).result(60)
    with pytest.raises(WorkerDied, match="doomed"):
        doomed.call("die").result(60)
    with pytest.raises(WorkerDied):
        doomed.call("add", 1).result(60)


def test_the_first_failure_ends_a_gather_although_others_wait(runtime):
    blocked = runtime.spawn(Target, 0, spec=WorkerSpec("blocked"))
    failing = runtime.spawn(Target, 0, spec=WorkerSpec("failing"))
    started = time.monotonic()
    with pytest.raises(ValueError, match="too small"):
        gather([blocked.call("wait"), failing.call("fail")], 60)
    assert time.monotonic() - started < 25
    blocked.kill()
    failing.kill()


def test_environment_and_slot_reach_the_worker(runtime):
    spec = WorkerSpec("env", slot=Slot(0, (3, 4)), env={"OMP_NUM_THREADS": "1"})
    worker = runtime.spawn(Target, 0, spec=spec)
    assert worker.call("env", "OMP_NUM_THREADS").result(60) == "1"
    assert worker.call("env", "CUDA_VISIBLE_DEVICES").result(60) == "3,4"


def test_closing_ends_every_process(tmp_path):
    runtime = LocalRuntime(tmp_path, shm.make_prefix())
    pids = [runtime.spawn(Target, 0, spec=WorkerSpec(f"w{i}")).call("pid").result(60) for i in range(2)]
    runtime.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
