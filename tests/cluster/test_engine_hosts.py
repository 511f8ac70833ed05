"""Engines wherever the runtime puts them: in this process, or by actors on two machines (two Ray nodes here).

The processes are the fakes of the fleet's tests, except where real engines of a plan are started.
"""

import functools
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from argument_helpers import parse
from patience import eventually
from ray_nodes import SECOND_HOST, two_ray_nodes
from tiny_model import make_tiny_model

from slime.arguments.passthrough.sglang_flags import find_python
from slime.cluster.serving.engine_host import HostedEngine
from slime.cluster.serving.served_model import make_servers
from slime.engines.engine_process import MEETING_POINT, EngineServer, LaunchPlan, MachineLost
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness import waits
from slime.runtime.base import WorkerSpec
from slime.runtime.local import LocalRuntime
from slime.runtime.placement import Machine, Placement, Slot, cores_each, plan_placement
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.machine import shm
from slime.utils.machine.run_identity import Run
from slime.wire.control import EngineControl

SCRIPT = Path(__file__).parents[1] / "support" / "fake_engine_process.py"


@pytest.fixture(scope="module")
def ray_cluster():
    """Two nodes with two GPUs each, as far as Ray's books go."""
    ray = pytest.importorskip("ray")
    with two_ray_nodes(num_gpus=2) as address:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
        yield address
        ray.shutdown()


# A run on Ray, and Ray's workers, have fast tests in tests/e2e/test_replay.py and tests/runtime.
@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def runtime(request, tmp_path):
    if request.param == "local":
        made = LocalRuntime(tmp_path, shm.make_prefix())
    else:
        request.getfixturevalue("ray_cluster")
        from slime.runtime.on_ray import RayRuntime

        made = RayRuntime(tmp_path)
    yield made
    made.close()


class Fleet:
    """One fake engine on each of these machines."""

    def __init__(self, folder: Path, runtime, machines):
        self.mood = folder / "mood"
        self.mood.write_text("well")
        plan = Placement((), tuple(Slot(i, machine=machine) for i, machine in enumerate(machines)))
        self.slots = runtime.claim(plan).engines
        self.engines = [self._engine(folder, runtime, slot, self.mood) for slot in self.slots]
        self.fleet = EngineFleet(self.engines, WatchPolicy(3, 600.0, poll_s=0.05))

    def _engine(self, folder: Path, runtime, slot: Slot, mood: Path, others=()):

        def command(port: int, ready: Path, life_fd: int) -> list[str]:
            fixed = [sys.executable, str(SCRIPT), str(port), str(ready), str(life_fd)]
            return [*fixed, str(mood), slot.host, MEETING_POINT]

        name = f"engine-{slot.index}"
        plan = LaunchPlan(name, command, {}, folder / f"{name}.log", 60.0, host=slot.host)
        spec = WorkerSpec(name, slot=slot, near_driver=True)
        own = functools.partial(runtime.spawn, spec, EngineServer, plan)
        return HostedEngine(plan, own, 600.0, others)

    def start(self) -> tuple[str, ...]:
        self.fleet.launch()
        return self.fleet.wait_ready()

    def wait_for_restart(self) -> None:
        eventually(lambda: self.fleet.num_restarts == 1 or self.fleet.failure.done())
        if self.fleet.failure.done():
            self.fleet.failure.result()


@pytest.fixture
def engines(runtime, tmp_path):
    """One on each machine that the runtime has."""
    made = Fleet(tmp_path, runtime, range(runtime.find_machines(1)))
    yield made
    made.fleet.stop()


@pytest.fixture
def engine(runtime, tmp_path):
    """One alone, on the last machine."""
    made = Fleet(tmp_path, runtime, [runtime.find_machines(1) - 1])
    yield made
    made.fleet.stop()


class OneEngine(Fleet):
    """One fake engine with a part on each of two machines (on one, where the runtime has no other)."""

    def __init__(self, folder: Path, runtime, silence_limit_s: float | None = None):
        plan = Placement((), tuple(Slot(i, machine=i % runtime.find_machines(1)) for i in range(2)))
        self.slots = runtime.claim(plan).engines
        self.moods = [folder / "mood-0", folder / "mood-1"]
        for mood in self.moods:
            mood.write_text("well")
        other = self._engine(folder, runtime, self.slots[1], self.moods[1])
        self.engines = [self._engine(folder, runtime, self.slots[0], self.moods[0], [other])]
        self.parts = self.engines[0].parts
        policy = WatchPolicy(3, 600.0, poll_s=0.05, silence_limit_s=silence_limit_s)
        self.fleet = EngineFleet(self.engines, policy)

    def meeting_points(self) -> set[str]:
        return {psutil.Process(part.pid).cmdline()[-1] for part in self.parts}


@pytest.fixture
def one_engine(runtime, tmp_path):
    made = OneEngine(tmp_path, runtime)
    yield made
    made.fleet.stop()


def node_of(pid: int) -> str:
    """The address of the Ray node that a process belongs to, by the command line of its raylet."""
    words = [word for parent in psutil.Process(pid).parents() for word in parent.cmdline()]
    return next(word.partition("=")[2] for word in words if word.startswith("--node_ip_address="))


def test_an_engine_comes_back_on_its_machine_and_all_are_gone_at_the_end(engines, runtime):
    urls = engines.start()
    assert [run(http_utils.get(url)) for url in urls] == [{"weight_version": "well"}] * len(urls)
    first = engines.engines[-1].pid
    os.kill(first, signal.SIGKILL)
    engines.wait_for_restart()
    assert engines.fleet.urls == urls
    assert engines.engines[-1].alive() and engines.engines[-1].pid != first
    assert run(http_utils.get(urls[-1])) == {"weight_version": "well"}
    pids = engines.fleet.pids
    if runtime.find_machines(1) > 1:
        hosts = [slot.host for slot in engines.slots]
        assert [node_of(pid) for pid in pids] == hosts and hosts[1] == SECOND_HOST != hosts[0]
        assert all(url.startswith(f"http://{host}:") for url, host in zip(urls, hosts, strict=True))
    engines.fleet.stop()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_what_an_engine_last_said_comes_from_its_machine(engine):
    engine.mood.write_text("dies")
    with pytest.raises(RunStopped, match=r"(?s)engine-0 ended with code 1; last lines of .*folder is empty"):
        engine.start()


def test_an_evicted_engine_is_dead_at_once(engine):
    (url,) = engine.start()
    with engine.fleet.frozen():
        engine.fleet.evict(url, RuntimeError("wrong weights"))
        assert not engine.fleet.is_alive(url)
        assert "was killed by signal 9" in engine.engines[0].describe_end()


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_over_two_machines_is_one_and_restarts_as_a_whole(one_engine, runtime, lost):
    (url,) = one_engine.start()
    first = [part.pid for part in one_engine.parts]
    (met,) = one_engine.meeting_points()
    assert met.startswith(f"{one_engine.slots[0].host}:") and one_engine.fleet.pids == (first[0],)
    if runtime.find_machines(1) > 1:
        assert [node_of(pid) for pid in first] == [slot.host for slot in one_engine.slots]
    os.kill(first[lost], signal.SIGKILL)
    one_engine.wait_for_restart()
    assert one_engine.fleet.urls == (url,) and one_engine.fleet.is_alive(url)
    pids = [part.pid for part in one_engine.parts]
    assert not {*first} & {*pids} and len(one_engine.meeting_points()) == 1
    assert not any(psutil.pid_exists(pid) for pid in first), "what was left has ended with the other"
    one_engine.fleet.stop()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_part_that_dies_at_the_start_is_named_while_the_others_wait(one_engine):
    one_engine.moods[0].write_text("silent")  # until the other is there
    one_engine.moods[1].write_text("dies")
    with pytest.raises(RunStopped, match=r"(?s)engine-1 ended with code 1; .*folder is empty"):
        one_engine.start()


def test_a_silent_part_takes_the_whole_engine_along(tmp_path):
    runtime = LocalRuntime(tmp_path, shm.make_prefix())
    engine = OneEngine(tmp_path, runtime, silence_limit_s=4.0)
    try:
        engine.start()
        first = [part.pid for part in engine.parts]
        os.kill(first[1], signal.SIGSTOP)
        engine.wait_for_restart()
        assert not any(psutil.pid_exists(pid) for pid in first)
    finally:
        engine.fleet.stop()
        runtime.close()


def test_an_engine_whose_second_machine_is_lost_leaves_nothing_running(tmp_path):
    runtime = LocalRuntime(tmp_path, shm.make_prefix())
    engine = OneEngine(tmp_path, runtime)
    head, other = engine.parts

    def lose(meeting_point):
        raise MachineLost("it is gone")

    other.launch = lose
    try:
        with pytest.raises(MachineLost):
            engine.engines[0].launch()
        eventually(lambda: not head.alive())
        assert not engine.engines[0].alive()
    finally:
        engine.fleet.stop()
        runtime.close()


@pytest.mark.slow
def test_an_engine_ends_with_its_owner_and_gets_another_on_the_same_port(tmp_path, ray_cluster):
    from slime.runtime.on_ray import RayRuntime

    runtime = RayRuntime(tmp_path)
    engines = Fleet(tmp_path, runtime, range(2))
    try:
        urls = engines.start()
        first = engines.engines[1].pid
        psutil.Process(first).parent().kill()  # the actor
        eventually(lambda: not psutil.pid_exists(first))
        engines.wait_for_restart()
        assert engines.fleet.urls == urls and node_of(engines.engines[1].pid) == SECOND_HOST
    finally:
        engines.fleet.stop()
        runtime.close()


@pytest.mark.slow
def test_engines_of_a_plan_serve_on_the_gpus_of_two_machines(tmp_path, ray_cluster):
    from slime.runtime.on_ray import RayRuntime

    make_tiny_model(tmp_path / "model")
    model = {
        "hf_checkpoint": tmp_path / "model",
        "run_dir": tmp_path,
        "rollout_engine": "embedded",
        "engine_threads": 1,
    }
    args = parse(
        "--debug-rollout-only", runtime="ray", rollout_num_gpus=4, rollout_num_gpus_per_engine=2, **model
    )
    runtime = RayRuntime(tmp_path)
    placement = runtime.claim(plan_placement(args, 2, runtime.find_machines(1)))
    assert {slot.host for slot in placement.engines} >= {SECOND_HOST}
    assert [slot.gpu_ids for slot in placement.engines] == [(0, 1), (0, 1)]
    servers = make_servers(args, Run("run", tmp_path, shm.make_prefix()), placement.engines, runtime)[
        "default"
    ]
    fleet = EngineFleet(servers, WatchPolicy(3, 600.0))
    try:
        fleet.launch()
        urls = fleet.wait_ready()
        assert [run(EngineControl(url).healthy(60.0)) for url in urls] == [True, True]
        assert [node_of(pid) for pid in fleet.pids] == [slot.host for slot in placement.engines]
        devices = [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in fleet.pids]
        assert devices == ["0,1", "0,1"]
        assert {server.plan.beside_trainer for server in servers} == {False}, (
            "no trainer: nobody shares memory"
        )
    finally:
        pids = fleet.pids
        fleet.stop()
        runtime.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.sglang
def test_a_real_sglang_server_serves_on_another_machine(tmp_path, ray_cluster):
    from slime.runtime.on_ray import RayRuntime

    python = find_python(None)
    if python is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    make_tiny_model(tmp_path / "model")
    flags = {
        "hf_checkpoint": tmp_path / "model",
        "run_dir": tmp_path,
        "rollout_engine": "sglang",
        "sglang_python": python,
    }
    args = parse("--debug-rollout-only", "--sglang-max-total-tokens", "8192", runtime="ray", **flags)
    runtime = RayRuntime(tmp_path)
    [slot] = runtime.claim(Placement((), (Slot(0, machine=1),))).engines
    [server] = make_servers(args, Run("run", tmp_path, shm.make_prefix()), (slot,), runtime)["default"]
    try:
        server.launch()
        assert server.wait_ready().startswith(f"http://{SECOND_HOST}:")
        assert run(EngineControl(server.url).healthy(120.0)) and node_of(server.pid) == SECOND_HOST
        workers = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        assert not server.alive() and f"last lines of {server.plan.log_path}" in server.describe_end()
        eventually(lambda: not any(worker.is_running() for worker in workers))
    finally:
        server.stop()
        runtime.close()


def test_a_plan_takes_the_names_of_real_machines():
    plan = Placement((Slot(0, (0,)), Slot(1, (0,), machine=1)), (Slot(0, (1, 2)),))
    assert plan.gpus_of_machines == (3, 1)
    real = plan.on([Machine("10.0.0.4", (5, 6, 7)), Machine("10.0.0.9", (2,))])
    assert real.host == "10.0.0.4"
    assert real.trainer == (Slot(0, (5,), 0, "10.0.0.4"), Slot(1, (2,), 1, "10.0.0.9"))
    assert real.engines == (Slot(0, (6, 7), 0, "10.0.0.4"),)


def test_processes_share_the_cores_of_the_machine_that_they_are_on(monkeypatch):
    monkeypatch.setattr("slime.runtime.placement.num_cores", lambda: 2)  # the driver's own
    plan = Placement((Slot(0, (0,)), Slot(1, (1,)), Slot(2, (0,), machine=1)), (Slot(0, (2,)),))
    assert cores_each(plan.trainer) == 1  # nothing is known of the machines: they are like this one
    real = plan.on([Machine("10.0.0.4", (0, 1, 2), cores=64), Machine("10.0.0.9", (0,), cores=48)])
    assert cores_each(real.trainer) == 24
    assert cores_each(real.engines) == 64
    assert cores_each(()) == 1


def test_a_host_that_starts_no_process_within_the_deadline_is_named_with_the_flag(tmp_path):
    class NeverDone:
        """The answer of a host that is still importing."""

        def done(self):
            return False

        def result(self, deadline_s=None):
            raise waits.WaitTimeout(f"engine-0.launch: not done after {deadline_s} s")

    class SlowHost:
        name = "engine-0"

        def call(self, method, *args):
            return NeverDone()

    plan = LaunchPlan("engine-0", lambda *_: [], {}, tmp_path / "log", 60.0, host="10.0.0.9")
    engine = HostedEngine(plan, lambda port: SlowHost(), answer_s=5.0)
    with pytest.raises(RunStopped, match=r"10.0.0.9 did not start a process within 5 s.*--timeouts"):
        engine.launch()
