"""The copy for engines that come late, when it cannot be written: who asked hears why at once."""

import asyncio
import errno
import time
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from patience import LONG_S, PATIENCE_S

from slime.catalog.engines import ENGINES
from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import until
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.weight_sync import disk
from slime.weight_sync.base import SenderOptions, WeightBundle
from slime.weight_sync.disk import until_written
from slime.weight_sync.late_copy import LateCopySender
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

UPDATE_FROM_DISK = EngineControl.update_from_disk  # before a fixture replaces it


class Disk:
    """Files are written as always, unless `error` says what the system answers instead."""

    def __init__(self):
        self.error: int | None = None
        self._write = disk.write_tensors

    def write(self, path, tensors) -> None:
        if self.error is not None:
            path.write_bytes(b"half a file")
            raise OSError(self.error, errno.errorcode[self.error], str(path))
        self._write(path, tensors)


@pytest.fixture
def faulty(monkeypatch):
    made = Disk()
    monkeypatch.setattr(disk, "write_tensors", made.write)
    return made


@pytest.fixture
def sender(tmp_path):
    made = LateCopySender(SenderOptions("slime-x", tmp_path / "weights", str(tmp_path)))
    yield made
    made.close()


def publish(sender, version: str = "run:1"):
    sender.send([("a", torch.ones(3))])
    sender.send([("b", torch.zeros(2))])
    return sender.finish(version)


def test_who_asks_hears_the_cause_at_once_and_may_ask_again(sender, faulty):
    bundle = publish(sender)
    faulty.error = errno.EIO
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"weights-run-1 could not be written: OSError.*EIO") as caught:
            run(until_written(bundle.payload))
        assert time.monotonic() - started < LONG_S and not isinstance(caught.value, RunStopped)
    faulty.error = None
    run(until_written(bundle.payload))
    assert sorted(file.name for file in bundle.payload.parent.iterdir()) == ["weights-run-1"]
    assert len(list(bundle.payload.glob("*.safetensors"))) == 2
    publish(sender, "run:2")  # the next push is free


def test_a_full_disk_ends_the_wait_with_the_folder_s_name(sender, faulty, tmp_path):
    bundle = publish(sender)
    faulty.error = errno.ENOSPC
    with pytest.raises(
        RunStopped, match=rf"no room for weights in {tmp_path}/weights .*--update-weight-disk-dir"
    ):
        run(until_written(bundle.payload))


def test_a_cause_that_does_not_fit_on_the_disk_is_still_a_refusal(sender, faulty, monkeypatch):
    bundle = publish(sender)
    faulty.error = errno.ENOSPC
    write_text = disk.Path.write_text

    def full(path, *args, **kwargs):
        if path.suffix == ".wanted":
            raise OSError(errno.ENOSPC, "no space")
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(disk.Path, "write_text", full)
    with pytest.raises(RunStopped, match="the disk of its folder may be full"):
        run(until_written(bundle.payload))


class Server:
    """An engine that serves, dies when it is killed, and serves again when it is launched."""

    def __init__(self):
        self.plan, self.url, self.pid = SimpleNamespace(name="engine-0"), "http://127.0.0.1:9", 1
        self.up, self.kills = True, 0

    def launch(self) -> None:
        self.up = True

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
def member(monkeypatch):
    """(fleet, weights, server): one engine, whose control plane says yes to everything."""
    info = EngineInfo(ENGINES["sglang"].dialect, "model", "default", 128, 64, {})

    async def yes(*args, **kwargs):
        return None

    for method in ("pause", "flush", "resume", "update_from_disk"):
        monkeypatch.setattr(f"slime.wire.control.EngineControl.{method}", yes)
    monkeypatch.setattr(EngineWeights, "info", lambda self, url: info)
    server = Server()
    args = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=None,
        timeouts={"update-weight": 60.0},
    )
    fleet = EngineFleet([server], WatchPolicy(3, 600.0, poll_s=0.02))
    weights = EngineWeights(args, "slime-x", ((),), fleet)
    weights._num_pushes = 1  # the deep comparison of the first push is not the subject
    yield fleet, weights, server
    fleet.stop()


def test_an_engine_that_gets_no_copy_is_evicted_and_the_cause_is_behind_the_end(
    member, sender, faulty, caplog
):
    fleet, weights, server = member
    faulty.error = errno.EIO
    assert weights.receive(publish(sender))["perf/engines_evicted"] == 1
    assert server.kills == 1 and "engine-0 is removed from the fleet: the copy of the weights" in caplog.text
    fleet.wait_ready()  # the watch begins: it is started again, asks again, and dies too often
    error = fleet.failure.exception(timeout=PATIENCE_S)
    assert "engines died 4 times" in str(error) and "EIO" in str(error) and "EIO" in str(error.__cause__)


def test_an_engine_that_a_live_push_reached_is_compared_where_asked_for(member, sender, monkeypatch, caplog):
    """It took the push, says the right version, and holds something else."""
    fleet, weights, server = member
    weights._args.check_weight_update_equal = True

    async def different(*args):
        return ["model.norm.weight"]

    monkeypatch.setattr("slime.weight_sync.disk.reload_and_compare", different)
    weights._current = set(fleet.urls)
    assert weights.receive(publish(sender))["perf/engines_evicted"] == 1
    assert server.kills == 1 and "differs from the trainer in 1 tensors: ['model.norm.weight']" in caplog.text


def test_no_room_for_a_restarted_engine_ends_the_run_at_once(member, sender, faulty):
    fleet, weights, server = member
    weights.bundle = publish(sender)
    faulty.error = errno.ENOSPC
    server.up = False
    fleet.wait_ready()
    until(fleet.failure.done, "the end of the run", PATIENCE_S)
    assert "no room for weights" in str(fleet.failure.exception()) and server.kills == 0


def test_an_engine_that_does_not_answer_within_the_deadline_is_evicted_by_name(
    member, tmp_path, caplog, monkeypatch
):
    _, weights, server = member

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
    weights._args.timeouts = {"update-weight": 0.3}
    started = time.monotonic()
    assert (
        weights.receive(WeightBundle("run:1", "disk", 1, 4, None, tmp_path / "bundle"))[
            "perf/engines_evicted"
        ]
        == 1
    )
    assert time.monotonic() - started < LONG_S and server.kills == 1
    assert (
        "engine-0 is removed from the fleet" in caplog.text
        and "update_weights_from_disk: not done after 0.3 s" in caplog.text
    )
    run(runner.cleanup())
