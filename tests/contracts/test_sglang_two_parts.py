"""A real SGLang server in two parts, as over two machines, is pushed to and restarted as one."""

import dataclasses
import functools
from types import SimpleNamespace

import psutil
import pytest
from devices import CLOSE, DEVICE
from engine_under_test import (
    EngineUnderTest,
    engine_variables,
    largest_difference,
    plain_log_probs,
    small_sglang_plan,
)

from slime.cluster.serving.engine_host import HostedEngine
from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.engine_process import EngineServer
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import until
from slime.runtime.base import WorkerSpec
from slime.runtime.local import LocalRuntime
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.weight_sync.base import SenderOptions
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.transports import transport_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def engine(tiny_folder, tmp_path_factory):
    """(the fleet of the server, what keeps its weights, the server under test)."""
    folder, prefix = tmp_path_factory.mktemp("parts"), shm.make_prefix()
    runtime, parts = LocalRuntime(folder, prefix), []
    for node in range(2):
        name = f"part-{node}"
        plan = small_sglang_plan(
            name, tiny_folder, folder / f"{name}.log", tensor_parallel=2, node=node, num_nodes=2
        )
        plan = dataclasses.replace(plan, env={**plan.env, "SGLANG_HOST_IP": "127.0.0.1"})
        spec = WorkerSpec(name, near_driver=True)
        parts.append((plan, functools.partial(runtime.spawn, spec, EngineServer, plan), 600.0))
    fleet = EngineFleet([HostedEngine(*parts[0], others=[HostedEngine(*parts[1])])], WatchPolicy(8, 3600.0))
    settings = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=1,
        timeouts={"update-weight": 60.0},
    )
    weights = EngineWeights(settings, prefix, ((), ()), fleet)
    fleet.launch()
    try:
        fleet.wait_ready()
        yield fleet, weights, EngineUnderTest(fleet.urls[0], tiny_folder, None, "")
    finally:
        fleet.stop()
        runtime.close()


def check(server: EngineUnderTest, model, version: str) -> None:
    made = server.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == version
    assert largest_difference(made.log_probs, plain_log_probs(model, PROMPT, made.ids)) < CLOSE
    ranks = {key.partition(":")[0] for key in run(server.control.checksums())}
    assert len(ranks) == server.can.num_ranks == 2


def push(weights: EngineWeights, model, version: str, options: SenderOptions, transport: str) -> None:
    items = [(name, tensor.to(DEVICE)) for name, tensor in model.state_dict().items()]
    if transport == "distributed":
        live, targets = DistributedSender(options), weights.begin_live()
        live.open(version, targets)
        live.send(items[: len(items) // 2])
        live.send(items[len(items) // 2 :])
        report = live.finish()
        assert report.failures == {}
        weights.finish_live(version, targets, report)
        live.close()
        transport = "disk"  # the copy that a restarted server loads
    sender = transport_of(transport).make_sender(options)
    sender.send(items)
    assert weights.receive(sender.finish(version))["perf/engines_evicted"] == 0


def test_both_parts_take_each_push_and_start_again_as_one_server(
    engine, tiny_folder, old_model, new_model, tmp_path, monkeypatch
):
    for name, value in engine_variables("trainer").items():
        monkeypatch.setenv(name, value)
    fleet, weights, server = engine
    options = SenderOptions(shm.make_prefix(), tmp_path / "weights", str(tiny_folder))
    check(server, old_model, "default")
    pushes = (("http_tensor", new_model), ("distributed", old_model), ("disk", new_model))
    for number, (transport, model) in enumerate(pushes, 1):
        push(weights, model, f"run:{number}", options, transport)
        check(server, model, f"run:{number}")
    for losses, part in enumerate(reversed(fleet.servers[0].parts), 1):
        psutil.Process(part.pid).kill()
        until(lambda losses=losses: fleet.num_restarts == losses, "the server to come back", 1800.0)
        check(server, new_model, "run:3")
    push(weights, old_model, "run:4", options, "distributed")
    check(server, old_model, "run:4")
