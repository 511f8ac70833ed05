"""A real prefill server, a real decode server and SGLang's router: the KV cache moves by TCP on this machine.

SLIME_TEST_KV_TRANSFER names another way to move it (nixl).
"""

import dataclasses
import os
import secrets
from types import SimpleNamespace

import psutil
import pytest
from devices import CLOSE, DEVICE
from engine_under_test import (
    engine_variables,
    largest_difference,
    plain_log_probs,
    served_by_sglang,
    sglang_python,
    small_sglang_plan,
)

from slime.arguments.passthrough.sglang_flags import find_python
from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.engines.launch_plan import _DISAGGREGATION
from slime.engines.sglang.environment import _TRANSFERS, packages_of
from slime.engines.sglang.router import SGLangRouter, router_command
from slime.liveness.waits import until
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.weight_sync.base import Sender, SenderOptions
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.transports import transport_of
from slime.weight_sync.verify import reload_and_compare
from slime.wire.client import EngineClient
from slime.wire.control import EngineControl
from slime.wire.protocol import GenerateRequest, Generation, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TRANSFER = os.environ.get("SLIME_TEST_KV_TRANSFER", "mooncake_tcp")
PROMPTS = [[10, 20, 30, 40, 50], list(range(3, 120)), [7]]
WAIT_S = 900.0


def generate(url: str, prompt: list[int]) -> Generation:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    # The router takes a moment to send requests to a server that is back.
    client = EngineClient(url, timeout_s=120, max_retries=60)
    return run(client.generate(GenerateRequest(prompt, greedy, rid=secrets.token_hex(8))))


@pytest.fixture(scope="module")
def pair(tiny_folder, tmp_path_factory):
    """(the fleet of both servers, what keeps their weights, the address of the router)."""
    if not any(found.startswith(_TRANSFERS[TRANSFER]) for found in packages_of(sglang_python())):
        pytest.skip(f"SGLang's environment lacks {_TRANSFERS[TRANSFER]}")
    if (python := find_python(None, ".venv-router", "sglang_router")) is None:
        pytest.skip("there is no router: `make sglang-env`")
    logs, plans = tmp_path_factory.mktemp("pd"), []
    os.environ.update(engine_variables("trainer"))
    for kind in ("prefill", "decode"):
        words = (*_DISAGGREGATION[kind], "--disaggregation-transfer-backend", TRANSFER)
        # Three servers share the GPU of this test.
        words += () if DEVICE == "cpu" else ("--mem-fraction-static", "0.2")
        plan = small_sglang_plan(kind, tiny_folder, logs / f"{kind}.log", *words)
        env = {**plan.env, "SGLANG_HOST_IP": "127.0.0.1"}
        plans.append(dataclasses.replace(plan, env=env, worker_type=kind))
    args = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=1,
        timeouts={"update-weight": 60.0},
    )
    fleet = EngineFleet([EngineServer(plan) for plan in plans], WatchPolicy(8, 3600.0))
    weights = EngineWeights(args, shm.make_prefix(), ((), ()), fleet)
    command = router_command(python, "round_robin", ("--pd-disaggregation",))
    plan = LaunchPlan("router", command, {}, logs / "router.log", 120.0)
    router = SGLangRouter(plan, WatchPolicy(5, 600.0))
    fleet.launch()
    try:
        fleet.wait_ready()
        for server in fleet.servers:
            router.enroll(server)
        fleet.follow(router)
        yield fleet, weights, f"http://127.0.0.1:{router.start()}"
    finally:
        fleet.follow(None)
        router.stop()
        fleet.stop()


def test_greedy_tokens_are_those_of_one_server(pair, tiny_folder, old_model, tmp_path):
    with served_by_sglang(tiny_folder, tmp_path / "plain.log", *_small()) as plain:
        expected = [generate(plain, prompt) for prompt in PROMPTS]
    for prompt, one in zip(PROMPTS, expected, strict=True):
        made = generate(pair[2], prompt)
        assert made.ids == one.ids and len(made.ids) == 30
        assert largest_difference(made.log_probs, plain_log_probs(old_model, prompt, made.ids)) < CLOSE


def _small() -> tuple[str, ...]:
    return () if DEVICE == "cpu" else ("--mem-fraction-static", "0.2")


@pytest.mark.parametrize("transport", ["http_tensor", "distributed"])
def test_both_servers_take_a_push_and_a_lost_one_comes_back_with_it(
    pair, old_model, new_model, tiny_folder, new_folder, tmp_path, transport
):
    """The prefill server is killed after pushes by HTTP, the decode server after those by a group."""
    fleet, weights, router = pair
    lost = ("http_tensor", "distributed").index(transport)
    options = SenderOptions(shm.make_prefix(), tmp_path / "weights", str(tiny_folder))
    models = ((new_model, new_folder), (old_model, tiny_folder))
    for number, (model, folder) in enumerate(models):
        version = f"{transport}:{number}"
        sender = push(weights, options, model, version, transport)
        assert_served(fleet, router, model, folder, version)
    restarts = fleet.num_restarts
    psutil.Process(fleet.pids[lost]).kill()
    until(lambda: fleet.num_restarts == restarts + 1, "the server to come back", WAIT_S)
    until(lambda: all(map(fleet.is_alive, fleet.urls)), "both servers", WAIT_S)
    assert_served(fleet, router, old_model, tiny_folder, f"{transport}:1")
    sender.close()
    shm.unlink_prefix(options.shm_prefix)


def push(weights: EngineWeights, options: SenderOptions, model, version: str, transport: str) -> Sender:
    """Push to both; the sender that is returned holds the weights for a server that restarts."""
    items = [(name, tensor.to(DEVICE)) for name, tensor in model.state_dict().items()]
    if transport == "distributed":
        live, targets = DistributedSender(options), weights.begin_live()
        live.open(version, targets)
        live.send(items)
        report = live.finish()
        assert report.failures == {}
        weights.finish_live(version, targets, report)
        live.close()
    sender = transport_of("disk" if transport == "distributed" else transport).make_sender(options)
    sender.send(items)  # after a live push: the copy for an engine that is late
    assert weights.receive(sender.finish(version))["perf/engines_evicted"] == 0
    return sender


def assert_served(fleet: EngineFleet, router: str, model, folder, version: str) -> None:
    """Both servers hold the model, and what the pair generates is what the model computes."""
    controls = [EngineControl(url) for url in fleet.urls]
    sums = [run(control.checksums()) for control in controls]
    assert sums[0] == sums[1] and len(sums[0]) > 10
    assert {run(control.version()) for control in controls} == {version}
    for prompt in PROMPTS:
        made = generate(router, prompt)
        assert made.weight_version == version
        assert largest_difference(made.log_probs, plain_log_probs(model, prompt, made.ids)) < CLOSE
    assert all(run(reload_and_compare(control, folder, version)) == [] for control in controls)
