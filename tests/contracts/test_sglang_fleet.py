"""Two real SGLang servers as a run has them: weight paths, versions per token, death under load."""

import asyncio
import dataclasses
import threading
import time
from pathlib import Path

import psutil
import pytest
from devices import CLOSE, DEVICE
from engine_under_test import EngineUnderTest, largest_difference, met, plain_log_probs, until_met
from rollout_helpers import assert_conserved, make_args, make_source
from stage_ranks import StageRanks

from slime.engines.balancer import Balancer
from slime.engines.engine_process import LaunchPlan
from slime.engines.fleet import WatchPolicy
from slime.engines.sglang.router import SGLangRouter, router_command
from slime.liveness.waits import until
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.types import Sample, flatten_samples
from slime.weight_sync.base import DeltaOptions, LiveReport, SenderOptions
from slime.weight_sync.delta.transport import DELTA
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.transports import transport_of
from slime.weight_sync.verify import reload_and_compare
from slime.wire.control import EngineControl

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).parents[2]
PROMPT = [10, 20, 30, 40, 50]
LENGTH = 200
END = 2  # the model's end of sequence


@pytest.fixture
def servers(sglang_pair, tiny_folder):
    """(fleet, its weights, one engine under test per server), all with the first weights."""
    fleet, weights = sglang_pair
    engines = [EngineUnderTest(url, tiny_folder, None, "") for url in fleet.urls]
    yield fleet, weights, engines
    for engine in engines:
        run(engine.control.update_from_disk(str(tiny_folder), "default"))


@pytest.fixture
def options(tiny_folder, tmp_path):
    made = SenderOptions(shm.make_prefix(), tmp_path / "weights", str(tiny_folder))
    yield made
    shm.unlink_prefix(made.shm_prefix)


def halves(model):
    items = [(name, tensor.to(DEVICE)) for name, tensor in model.state_dict().items()]
    return items[: len(items) // 2], items[len(items) // 2 :]


def make_bundle(transport: str, options, model, version: str):
    sender = transport_of(transport).make_sender(options)
    for bucket in halves(model):
        sender.send(bucket)
    return sender, sender.finish(version)


def assert_all_hold(engines, model, folder, version: str) -> None:
    """The version, checksums as of a load from files, and log-probs of the trainer's model."""
    sums = [run(engine.control.checksums()) for engine in engines]
    assert sums[0] == sums[1] and len(sums[0]) > 10
    for engine in engines:
        made = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
        assert made.weight_version == version == run(engine.control.version())
        assert largest_difference(made.log_probs, plain_log_probs(model, PROMPT, made.ids)) < CLOSE
    assert run(reload_and_compare(engines[0].control, folder, version)) == []


@pytest.mark.parametrize("transport", ["http_tensor", "disk"])
def test_a_bundle_brings_both_servers_to_the_trainer_s_weights(
    servers, options, new_model, new_folder, transport
):
    _, weights, engines = servers
    sender, bundle = make_bundle(transport, options, new_model, f"run:{transport}")
    metrics = weights.receive(bundle)
    assert metrics["perf/engines_evicted"] == 0
    assert_all_hold(engines, new_model, new_folder, f"run:{transport}")
    sender.close()


def test_deltas_bring_both_servers_to_the_trainer_s_weights_and_one_that_was_killed_catches_up(
    servers, options, old_model, new_model, tiny_folder, new_folder, tmp_path
):
    """There, back, and there again: one copy beside the two servers, which load it from disk."""
    pytest.importorskip("zstandard")
    fleet, weights, engines = servers
    sender = DELTA.make_sender(dataclasses.replace(options, delta=DeltaOptions(tmp_path / "local")))
    routes = []
    pushes = ((old_model, tiny_folder), (new_model, new_folder), (old_model, tiny_folder))
    for i, (model, folder) in enumerate(pushes, 1):
        for bucket in halves(model):
            sender.send(bucket)
        bundle = sender.finish(f"run:{i}")
        routes.append("perf/update_weights_density" in bundle.metrics)
        assert weights.receive(bundle)["perf/engines_evicted"] == 0
        assert_all_hold(engines, model, folder, f"run:{i}")
    assert routes == [False, True, True]
    restarts = fleet.num_restarts
    psutil.Process(fleet.pids[0]).kill()
    until(lambda: fleet.num_restarts == restarts + 1, "the server to come back", 900.0)
    assert_all_hold(engines, old_model, tiny_folder, "run:3")
    sender.close()


def test_a_process_group_brings_both_servers_to_the_trainer_s_weights(
    servers, options, old_model, new_model, tiny_folder, new_folder
):
    """Twice over the same group, there and back; the copy on disk comes after, for whoever is late."""
    _, weights, engines = servers
    live = DistributedSender(options)
    pushes = ((new_model, new_folder, "run:1"), (old_model, tiny_folder, "run:2"))
    for model, folder, version in pushes:
        targets = weights.begin_live()
        live.open(version, targets)
        for bucket in halves(model):
            live.send(bucket)
        report = live.finish()
        assert report.failures == {} and report.num_tensors == len(model.state_dict())
        weights.finish_live(version, targets, report)
        assert_all_hold(engines, model, folder, version)
        sender, bundle = make_bundle("disk", options, model, version)
        weights.receive(bundle)
        sender.close()
    live.close()


def test_two_stages_with_a_group_each_bring_both_servers_to_the_trainer_s_weights(
    servers, options, old_model, new_model, tiny_folder, new_folder
):
    """There and back over the same groups, which a server that was killed in between joins again."""
    fleet, weights, engines = servers
    ranks, restarts = StageRanks(2, 2, deadline_s=60), fleet.num_restarts

    def push(version: str, model, folder, meanwhile=None) -> dict[str, str]:
        targets = weights.begin_live()
        ranks.begin(targets, version, folder, **({"stop_at": [1, 1]} if meanwhile else {}))
        if meanwhile:
            assert ranks.hear(1) == {"stopped": True}
            meanwhile()
            ranks.tell(1, {})
        answer, other = ranks.hear_all()
        assert answer["failures"] == other["failures"] and len(targets) == 2
        weights.finish_live(
            version, targets, LiveReport(answer["num_tensors"], answer["nbytes"], answer["failures"])
        )
        sender, bundle = make_bundle("disk", options, model, version)
        weights.receive(bundle)
        until(lambda: all(map(fleet.is_alive, fleet.urls)), "both servers", 600.0)
        assert_all_hold(engines, model, folder, version)
        sender.close()
        return answer["failures"]

    try:
        assert push("run:1", new_model, new_folder) == {} == push("run:2", old_model, tiny_folder)
        failures = push("run:3", new_model, new_folder, psutil.Process(fleet.pids[1]).kill)
        # NCCL may end the process of the survivor too, which then starts again.
        assert 1 <= fleet.num_restarts - restarts <= (1 if DEVICE == "cpu" else 2)
        assert "slime-pp_" in failures[fleet.urls[0]] and fleet.urls[1] in failures[fleet.urls[0]]
        assert push("run:4", old_model, tiny_folder) == {}
    finally:
        ranks.stop()


def test_requests_in_flight_go_on_with_the_new_weights_and_say_which_token_is_whose(
    servers, options, old_model, new_model
):
    _, weights, engines = servers
    if not engines[0].can.dialect.has_spans:
        pytest.skip("this release of SGLang does not report the version of each token")
    sender, bundle = make_bundle("http_tensor", options, new_model, "run:1")

    async def start():
        tasks = [
            asyncio.create_task(e.agenerate(PROMPT, max_new_tokens=400, ignore_eos=True)) for e in engines
        ]
        await engines[0].running(tokens=10)
        return tasks

    async def finish(tasks):
        return await asyncio.gather(*tasks)

    def push():
        tasks = run(start())
        weights.receive(bundle)
        made = run(finish(tasks))
        met(all(len(one.spans) > 1 for one in made))
        return made

    for made in until_met(push, lambda: [engine.reset() for engine in engines]):
        assert [span.version for span in made.spans] == ["default", "run:1"] and len(made.ids) == 400
        cut = made.spans[0].end
        old, new = (plain_log_probs(model, PROMPT, made.ids) for model in (old_model, new_model))
        assert largest_difference(made.log_probs, [*old[:cut], *new[cut:]]) < CLOSE
    sender.close()


def rollout_args(folder, port: int, urls, *flags: str):
    facts = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
    facts |= {"engine_urls": urls, "rollout_num_engines": len(urls)}
    flags = ("--rollout-max-response-len", str(LENGTH), *flags)
    return make_args(folder, None, *flags, prompts=64, max_context_len=512, **facts)


@pytest.fixture
def balancer(sglang_pair):
    made = Balancer(sglang_pair[0].urls)
    port = run(made.start())
    yield port
    run(made.stop())


@pytest.fixture(params=["builtin", pytest.param("sglang", marks=pytest.mark.slow)])
def front(request, sglang_pair, tmp_path):
    """The port of either router, which hears who leaves and returns."""
    if request.param == "builtin":
        yield request.getfixturevalue("balancer")
        return
    router = make_router(sglang_pair[0], tmp_path)
    sglang_pair[0].follow(router)
    try:
        yield router.start()
    finally:
        sglang_pair[0].follow(None)
        router.stop()


def make_router(fleet, folder) -> SGLangRouter:
    python = ROOT / ".venv-router" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no router: `make sglang-env`")
    command = router_command(str(python), "round_robin")
    router = SGLangRouter(
        LaunchPlan("router", command, {}, folder / "router.log", 120.0), WatchPolicy(5, 600.0)
    )
    for server in fleet.servers:
        router.enroll(server)
    return router


def in_thread(work):
    """(thread, list that gets the result)."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def wait_for_requests(urls) -> None:
    """Wait until each server runs a request and has made a few tokens: a moment later all may be done."""
    deadline = time.monotonic() + 60
    while not all(run(EngineControl(url).load())[0] for url in urls):
        assert time.monotonic() < deadline, "no request reached the servers"
        time.sleep(0.01)
    time.sleep(0.1)


def test_an_engine_without_versions_per_token_is_pushed_to_by_abort_and_resubmission(
    servers, options, balancer, old_model, new_model, tmp_path
):
    fleet, weights, _ = servers
    for url in fleet.urls:  # what an older SGLang would say of itself
        info = weights.info(url)
        silent = dataclasses.replace(info, dialect=dataclasses.replace(info.dialect, has_spans=False))
        weights._members[url] = dataclasses.replace(weights._members[url], info=silent)
    args = rollout_args(tmp_path, balancer, fleet.urls)
    source = make_source(args)
    sender, bundle = make_bundle("http_tensor", options, new_model, "run:1")
    thread, results = in_thread(lambda: generate_rollout(args, 0, source))
    wait_for_requests(fleet.urls)
    weights.receive(bundle)
    thread.join(300)
    weights._members.clear()
    samples = flatten_samples(results[0].samples)
    assert len(samples) == 8
    crossed = [s for s in samples if len({version for version, _, _ in s.version_spans}) == 2]
    assert crossed
    for sample in crossed:
        (_, _, cut), *_ = sample.version_spans
        prompt, ids = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
        old, new = (plain_log_probs(model, prompt, ids) for model in (old_model, new_model))
        assert largest_difference(sample.rollout_log_probs, [*old[:cut], *new[cut:]]) < CLOSE
    sender.close()


def test_a_server_killed_under_load_loses_no_sample_and_comes_back_with_the_current_weights(
    servers, options, front, new_model, tmp_path
):
    fleet, weights, engines = servers
    sender, bundle = make_bundle("http_tensor", options, new_model, "run:7")
    weights.receive(bundle)
    args = rollout_args(tmp_path, front, fleet.urls, "--rollout-batch-size", "16")
    source = make_source(args)
    restarts = fleet.num_restarts
    thread, results = in_thread(lambda: generate_rollout(args, 0, source))
    wait_for_requests(fleet.urls)
    psutil.Process(fleet.pids[1]).children()[0].kill()
    thread.join(300)
    samples = flatten_samples(results[0].samples)
    assert len(samples) == 32 and {s.status for s in samples} <= {
        Sample.Status.COMPLETED,
        Sample.Status.TRUNCATED,
    }
    assert all(s.tokens[-1] == END or s.response_length == LENGTH for s in samples)
    assert {version for s in samples for version, _, _ in s.version_spans} == {"run:7"}
    assert_conserved(source)
    deadline = time.monotonic() + 600
    while fleet.num_restarts == restarts and time.monotonic() < deadline:
        time.sleep(0.5)
    assert fleet.num_restarts == restarts + 1
    assert run(EngineControl(fleet.urls[1]).version()) == "run:7"
    assert run(engines[0].control.checksums()) == run(EngineControl(fleet.urls[1]).checksums())
    sender.close()


def test_the_real_router_serves_a_rollout_and_knows_its_workers_again_after_a_kill(servers, tmp_path):
    fleet, _, _ = servers
    router = make_router(fleet, tmp_path)
    try:
        port = router.start()
        args = rollout_args(tmp_path, port, fleet.urls)
        source = make_source(args)
        assert len(flatten_samples(generate_rollout(args, 0, source).samples)) == 8
        psutil.Process(router._server.pid).children()[0].kill()
        # The next rollout begins while the router is away: its requests wait for it.
        samples = flatten_samples(generate_rollout(args, 1, source).samples)
        assert len(samples) == 8 and all(s.rollout_log_probs for s in samples)
        assert router._watched.num_restarts == 1
        assert_conserved(source)
    finally:
        router.stop()


@pytest.mark.slow
def test_the_real_router_killed_under_load_loses_no_sample(servers, tmp_path):
    """Its requests are sent again under their ids, while engines may still work on the first ones."""
    fleet, _, _ = servers
    router = make_router(fleet, tmp_path)
    try:
        flags = (
            "--rollout-max-response-len",
            "480",
            "--custom-generate-function-path",
            "rollout_plugins.never_ends",
        )
        args = rollout_args(tmp_path, router.start(), fleet.urls, *flags)
        source = make_source(args)
        thread, results = in_thread(lambda: generate_rollout(args, 0, source))
        wait_for_requests(fleet.urls)
        psutil.Process(router._server.pid).children()[0].kill()
        thread.join(300)
        assert results, "the rollout failed"
        samples = flatten_samples(results[0].samples)
        assert len(samples) == 8 and all(
            s.response_length == 480 == len(s.rollout_log_probs) for s in samples
        )
        assert router._watched.num_restarts == 1
        assert_conserved(source)
    finally:
        router.stop()
