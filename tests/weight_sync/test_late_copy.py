"""Weights for engines that missed a live push or restart after it: the trainer writes them only then."""

import asyncio
import concurrent.futures
import contextlib
import errno
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from patience import LONG_S, PATIENCE_S
from safetensors.torch import load_file

from slime.catalog.engines import ENGINES
from slime.cluster.restart.recovery import Recovery
from slime.cluster.restart.replay import ReplayLog, SafeState
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.trainer import Trainer
from slime.cluster.weight_push import WeightPush
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import until
from slime.runtime.base import Call, Ready
from slime.utils.async_utils import in_background, run
from slime.utils.errors import RunStopped
from slime.weight_sync import disk
from slime.weight_sync.base import LiveReport, SenderOptions, WeightBundle
from slime.weight_sync.disk import DiskSender
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

UPDATE_FROM_DISK = EngineControl.update_from_disk  # before a fixture replaces it


class Ranks:
    """A trainer of one rank, in this process: its weights are `value`, and it reaches all but `missed`."""

    def __init__(self, folder):
        self.value, self.missed, self.noted = 0.0, {}, []
        self.while_sending = lambda: None
        self.disk = DiskSender(SenderOptions("slime-x", folder, str(folder)))

    def part(self, owner):
        return self

    def call(self, method, *args):
        return [getattr(self, method.__name__)(*args)]

    def send_live(self, version, dtype, targets):
        self.while_sending()
        return LiveReport(2, 20, dict(self.missed), {0: 20})

    def export(self, version, dtype):
        self.disk.send([("a", torch.full((3,), self.value))])
        self.disk.send([("b", torch.zeros(2))])
        return self.disk.finish(version)

    def note_version(self, number):
        self.noted.append(number)


class Direct:
    """A handle on an object of this process."""

    def __init__(self, held):
        self._held = held

    def call_control(self, method, *args, **kwargs):
        return Ready(getattr(self._held, method.__name__)(*args, **kwargs))


class Residency:
    """Nothing is moved: trainer and engines have devices of their own."""

    phase = staticmethod(lambda phase: contextlib.nullcontext())
    with_parameters = staticmethod(contextlib.nullcontext)


class Server:
    """An engine that serves, dies when it is killed, and serves again when it is launched."""

    def __init__(self):
        self.plan, self.url, self.pid = SimpleNamespace(name="engine-0"), "http://127.0.0.1:9", 1
        self.up, self.kills, self.starts = True, 0, 0

    def launch(self) -> None:
        self.up, self.starts = True, self.starts + 1

    def wait_ready(self) -> str:
        return self.url

    def alive(self) -> bool:
        return self.up

    def describe_end(self) -> str:
        return "was killed"

    def kill(self) -> None:
        self.up, self.kills = False, self.kills + 1

    def stop(self) -> None:
        self.up = False


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Two engines whose control plane says yes to everything, and a trainer that pushes to them live."""
    info = EngineInfo(ENGINES["sglang"].dialect, "model", "default", 128, 64, {})
    loaded: list[tuple[str, str, float]] = []  # (engine, version, value) of each load of files
    held: dict[str, str] = {}

    async def yes(*args, **kwargs):
        return None

    async def load(control, folder, version):
        value = load_file(f"{folder}/model-00001.safetensors")["a"][0].item()
        loaded.append((control.url, version, value))
        held[control.url] = version
        return SimpleNamespace(checksum=None)

    async def version(control):
        return held.get(control.url, world.pushed)

    async def ends_update(control):
        held.pop(control.url, None)

    for method in ("pause", "flush", "resume", "begin_update"):
        monkeypatch.setattr(EngineControl, method, yes)
    monkeypatch.setattr(EngineControl, "end_update", ends_update)
    monkeypatch.setattr(EngineControl, "update_from_disk", load)
    monkeypatch.setattr(EngineControl, "version", version)
    monkeypatch.setattr(EngineWeights, "info", lambda self, url: known(self, url))

    def known(weights, url):
        weights._members.setdefault(url, SimpleNamespace(life=1, info=info, gpu_ids=()))
        return info

    servers = [Server(), Server()]
    servers[1].url, servers[1].plan = "http://127.0.0.1:10", SimpleNamespace(name="engine-1")
    args = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=None,
        timeouts={"update-weight": 60.0},
    )
    fleet = EngineFleet(servers, WatchPolicy(9, 600.0, poll_s=0.02))
    weights = EngineWeights(args, "slime-x", ((), ()), fleet)
    weights._num_pushes = 1  # the deep comparison of the first push is not the subject
    ranks = Ranks(tmp_path / "weights")
    push = WeightPush(
        ranks, Direct(weights), Residency(), "run", None, transport="distributed", engine_urls=fleet.urls
    )
    world = SimpleNamespace(fleet=fleet, weights=weights, servers=servers, ranks=ranks, push=push, pushed="")
    world.loaded, world.folder, world.args = loaded, tmp_path / "weights", args
    fleet.wait_ready()  # the watch begins
    yield world
    fleet.stop()


def push(world, value: float) -> dict[str, float]:
    world.ranks.value, world.pushed = value, f"run:{world.push.num_pushes + 1}"
    return world.push.push()


def kill(world, *places: int) -> None:
    """End engines, and wait until those that replace them have started."""
    before = {place: world.servers[place].starts for place in places}
    for place in places:
        world.servers[place].up = False
    for place in places:
        until(lambda place=place: world.servers[place].starts > before[place], "a restart", PATIENCE_S)


def serves(world, place: int) -> None:
    until(lambda: world.fleet.is_alive(world.servers[place].url), "the engine to return", PATIENCE_S)


def test_nothing_is_written_or_held_where_no_engine_is_missing(world):
    assert push(world, 1.0)["perf/engines_missed"] == 0
    assert not world.folder.exists() and world.loaded == [] and world.ranks.noted == [1]
    assert not world.push.wants_files(changed=False)


def test_an_engine_that_restarts_gets_the_version_that_the_others_serve(world):
    push(world, 1.0)
    kill(world, 0)
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    assert not world.fleet.is_alive(world.servers[0].url), "it waits"
    world.push.write_files(changed=False)
    serves(world, 0)
    assert world.loaded == [(world.servers[0].url, "run:1", 1.0)] and world.push.num_pushes == 1
    assert not world.push.wants_files(changed=False)


@pytest.mark.parametrize("has_trained", [False, True])
def test_the_driver_has_the_files_written_while_it_waits_for_a_rollout(world, has_trained):
    push(world, 1.0)
    ranks, runtime = SimpleNamespace(lost=None), SimpleNamespace(failure=concurrent.futures.Future())
    replay = ReplayLog(SafeState(None, None, -1))
    others = dict.fromkeys(("args", "run", "group", "residency", "saver"))
    trainer = Trainer(
        **others,
        timeline=SimpleNamespace(noted=lambda *about: contextlib.nullcontext()),
        recovery=Recovery(0, ranks, runtime, replay, print, print),
        replay=replay,
        weight_push=world.push,
    )
    trainer._has_trained = has_trained
    world.ranks.value = 2.0 if has_trained else 1.0
    kill(world, 0, 1)

    rollout = Call("rollout", "generate")

    def generate():
        serves(world, 0)
        rollout.set_result("a rollout")

    in_background(generate, "rollout")
    assert trainer.guard(rollout, 0).result() == "a rollout"
    assert world.loaded[0][1:] == (("run:2", 2.0) if has_trained else ("run:1", 1.0))
    assert [entry.name for entry in replay._entries.values()] == (
        ["weights 2"] if has_trained else []
    ) and not trainer._has_trained


def test_an_engine_that_dies_while_it_waits_is_started_again(world):
    push(world, 1.0)
    kill(world, 0)
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    kill(world, 0)
    world.push.write_files(changed=False)
    serves(world, 0)


def test_after_a_step_of_the_trainer_a_late_engine_waits_for_the_next_version(world):
    """The others serve the version before, which the trainer has no more."""
    push(world, 1.0)
    kill(world, 0)
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    assert not world.push.wants_files(changed=True)
    push(world, 2.0)
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    world.push.write_files(changed=False)
    serves(world, 0)
    assert world.loaded == [(world.servers[0].url, "run:2", 2.0)]


def test_where_no_engine_is_left_after_a_step_all_get_the_new_weights_as_a_new_version(world):
    push(world, 1.0)
    kill(world, 0, 1)
    world.ranks.value = 2.0
    until(lambda: world.push.wants_files(changed=True), "the request", PATIENCE_S)
    world.push.write_files(changed=True)
    for place in (0, 1):
        serves(world, place)
    assert sorted(world.loaded)[0][1:] == sorted(world.loaded)[1][1:] == ("run:2", 2.0)
    assert world.weights.version == "run:2" and push(world, 3.0)["rollout/weight_version"] == 3


def test_an_engine_that_is_added_to_the_run_gets_the_version_that_the_others_serve(world):
    push(world, 1.0)
    added = Server()
    added.url, added.plan = "http://127.0.0.1:11", SimpleNamespace(name="engine-2")
    world.fleet.admit(added)
    assert not world.fleet.is_alive(added.url), "it waits, and the caller does not"
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    world.push.write_files(changed=False)
    until(lambda: world.fleet.is_alive(added.url), "the engine to join", PATIENCE_S)
    assert world.loaded == [(added.url, "run:1", 1.0)]


def test_an_engine_that_is_added_during_a_push_joins_after_it_with_the_version_of_the_push(world):
    push(world, 1.0)
    added = Server()
    added.url, added.plan = "http://127.0.0.1:11", SimpleNamespace(name="engine-2")
    joining, is_ready = [], threading.Event()
    added.wait_ready = is_ready.set

    def add() -> None:
        joining.append(in_background(lambda: world.fleet.admit(added), "add"))
        assert is_ready.wait(PATIENCE_S) and added not in world.fleet.servers

    world.ranks.while_sending = add
    assert push(world, 2.0)["perf/engines_missed"] == 0
    joining[0].result(PATIENCE_S)
    until(lambda: world.push.wants_files(changed=False), "the request", PATIENCE_S)
    assert world.loaded == [], "nothing is written before the run asks for it"
    world.push.write_files(changed=False)
    until(lambda: world.fleet.is_alive(added.url), "the engine to join", PATIENCE_S)
    assert world.loaded == [(added.url, "run:2", 2.0)]


def test_an_engine_that_missed_the_push_loads_files_before_the_run_continues(world):
    world.ranks.missed = {world.servers[1].url: "it hung"}
    assert push(world, 1.0)["perf/engines_missed"] == 1
    assert world.loaded == [(world.servers[1].url, "run:1", 1.0)]


def test_engines_that_a_live_push_reached_are_compared_where_asked_for(world, monkeypatch, caplog):
    """They took the push, say the right version, and hold something else."""
    world.args.check_weight_update_equal = True

    async def different(*args):
        return ["model.norm.weight"]

    monkeypatch.setattr("slime.weight_sync.disk.reload_and_compare", different)
    assert push(world, 1.0)["perf/engines_evicted"] == 2
    assert "differs from the trainer in 1 tensors: ['model.norm.weight']" in caplog.text


def test_a_full_disk_ends_the_run_with_the_folder_s_name(world, monkeypatch):
    push(world, 1.0)

    def full(path, tensors):
        raise OSError(errno.ENOSPC, "no space", str(path))

    monkeypatch.setattr(disk, "write_tensors", full)
    with pytest.raises(
        RunStopped, match=rf"no room for weights in {world.folder} .*--update-weight-disk-dir"
    ):
        world.push.write_files(changed=False)


def test_an_engine_that_does_not_answer_within_the_deadline_is_evicted_by_name(
    world, tmp_path, caplog, monkeypatch
):
    server = world.servers[0]

    async def silent(request):
        await asyncio.sleep(PATIENCE_S)

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", silent)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def serve() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    monkeypatch.setattr(EngineControl, "update_from_disk", UPDATE_FROM_DISK)
    server.url = run(serve())
    (tmp_path / "bundle").mkdir()
    world.args.timeouts = {"update-weight": 0.3}
    started = time.monotonic()
    world.weights.receive(WeightBundle("run:1", "disk", 1, 4, None, tmp_path / "bundle"))
    assert time.monotonic() - started < LONG_S and server.kills == 1
    assert (
        "engine-0 is removed from the fleet" in caplog.text
        and "update_weights_from_disk: not done after 0.3 s" in caplog.text
    )
    run(runner.cleanup())
