"""A real engine that joins in the middle of a push gets the new weights before it is asked for anything."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from devices import CLOSE, DEVICE
from engine_under_test import (
    EngineUnderTest,
    largest_difference,
    plain_log_probs,
    small_embedded_command,
    small_sglang_plan,
)
from patience import PATIENCE_S

from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.external import ExternalServer, discover
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import until
from slime.utils.async_utils import in_background, run
from slime.utils.machine import shm
from slime.utils.machine.children import thread_environment
from slime.weight_sync.base import SenderOptions, WeightBundle
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.transports import transport_of
from slime.wire.control import EngineControl

PROMPT = [10, 20, 30, 40, 50]
ENGINES = ["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow])]


class Newcomer(ExternalServer):
    """Reports when it asks to join: it serves by then."""

    def __init__(self, url: str, model: Path):
        super().__init__(discover([url], str(model))[0], PATIENCE_S)
        self.asks = threading.Event()

    def wait_ready(self) -> str:
        url = super().wait_ready()
        self.asks.set()
        return url


class Rotation:
    """Notes the weights that an engine holds when requests may go to it."""

    def __init__(self):
        self.held = {}

    def add(self, server) -> None:
        self.held[server.url] = run(EngineControl(server.url).version())

    def remove(self, url: str) -> None:
        del self.held[url]


@pytest.fixture(params=ENGINES)
def world(request, tiny_folder, tmp_path):
    """(fleet of one engine, its weights, an engine that serves and is in no fleet, options of a sender)."""
    prefix, servers = shm.make_prefix(), []
    for name in ("engine-0", "engine-1"):
        if request.param == "embedded":
            command = small_embedded_command(tiny_folder, prefix)
            log = tmp_path / f"{name}.log"
            plan = LaunchPlan(name, command, thread_environment(1), log, PATIENCE_S)
        else:
            plan = small_sglang_plan(name, tiny_folder, tmp_path / f"{name}.log")
        servers.append(EngineServer(plan))
    first, other = servers
    settings = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=1,
        timeouts={"update-weight": 60.0},
    )
    fleet = EngineFleet([first], WatchPolicy(0, 3600.0))
    weights = EngineWeights(settings, prefix, ((),), fleet)
    other.launch()
    fleet.launch()
    try:
        fleet.wait_ready()
        newcomer = Newcomer(other.wait_ready(), tiny_folder)
        yield fleet, weights, newcomer, SenderOptions(prefix, tmp_path / "weights", str(tiny_folder))
    finally:
        fleet.stop()
        other.stop()
        shm.unlink_prefix(prefix)


@pytest.mark.parametrize("live", [True, False])
def test_an_engine_that_joins_in_the_middle_of_a_push_serves_the_new_weights_alone(
    world, old_model, new_model, tiny_folder, live
):
    fleet, weights, newcomer, options = world
    weights.receive(files_of(old_model, options, "run:1"))
    rotation, joining = Rotation(), []
    fleet.follow(rotation)

    def join() -> None:
        joining.append(in_background(lambda: fleet.admit(newcomer), "join"))
        assert newcomer.asks.wait(PATIENCE_S)
        assert newcomer not in fleet.servers and not joining[0].done()

    if live:
        push_live(weights, new_model, options, "run:2", meanwhile=join)
    else:
        bundle, overwrite = files_of(new_model, options, "run:2"), weights._loaded.overwrite

        async def joined(*args) -> None:  # the first engine is paused and still has the old weights
            weights._loaded.overwrite = overwrite
            await asyncio.to_thread(join)

        weights._loaded.overwrite = joined
        weights.receive(bundle)
    joining[0].result(PATIENCE_S)
    assert weights.version == "run:2"
    if live:
        until(lambda: weights.wants_files(changed=False), "the request for files", PATIENCE_S)
        assert rotation.held == {} and not fleet.is_alive(newcomer.url)
        weights.add_files(files_of(new_model, options, "run:2"))
    until(lambda: newcomer.url in rotation.held, "the engine to join", PATIENCE_S)
    assert rotation.held == {newcomer.url: "run:2"}
    sums = [run(EngineControl(url).checksums()) for url in fleet.urls]
    assert sums[0] == sums[1] and len(fleet.urls) == 2
    for url in fleet.urls:
        made = EngineUnderTest(url, tiny_folder, None, "").generate(PROMPT, max_new_tokens=30)
        assert made.weight_version == "run:2"
        assert largest_difference(made.log_probs, plain_log_probs(new_model, PROMPT, made.ids)) < CLOSE


def halves(model):
    items = [(name, tensor.to(DEVICE)) for name, tensor in model.state_dict().items()]
    return items[: len(items) // 2], items[len(items) // 2 :]


def files_of(model, options: SenderOptions, version: str) -> WeightBundle:
    sender = transport_of("disk").make_sender(options)
    for bucket in halves(model):
        sender.send(bucket)
    return sender.finish(version)


def push_live(weights: EngineWeights, model, options: SenderOptions, version: str, meanwhile) -> None:
    """Send the halves of the model, with `meanwhile` between them; no files are written."""
    live, targets = DistributedSender(options), weights.begin_live()
    live.open(version, targets)
    first, second = halves(model)
    live.send(first)
    meanwhile()
    live.send(second)
    report = live.finish()
    assert report.failures == {} and len(targets) == 1
    weights.finish_live(version, targets, report)
    assert not weights.needs_files()
    weights.receive(WeightBundle(version, "disk", report.num_tensors, report.nbytes, None, None))
    live.close()
