"""Evaluation while training aborts its surplus and pushes weights: all samples end, with their versions."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from devices import CLOSE
from engine_under_test import (
    CONTEXT,
    largest_difference,
    met,
    plain_log_probs,
    small_embedded_command,
    until_met,
)
from patience import PATIENCE_S
from rollout_helpers import assert_conserved, make_args, make_source, write_prompts

from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.balancer import Balancer
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.children import thread_environment
from slime.utils.types import Sample
from slime.weight_sync.base import SenderOptions
from slime.weight_sync.transports import transport_of
from slime.wire.control import EngineControl

NUM_PROMPTS, LENGTH = 6, 400
TEMPERATURE = 0.5  # of evaluation: tells its log-probs from those of training


@pytest.fixture(scope="module")
def embedded_fleet(tiny_folder, tmp_path_factory) -> Iterator[tuple[EngineFleet, EngineWeights]]:
    prefix = shm.make_prefix()
    command = small_embedded_command(tiny_folder, prefix, max_running_requests=32, max_total_tokens=1 << 15)
    log = tmp_path_factory.mktemp("embedded") / "engine.log"
    server = EngineServer(LaunchPlan("engine", command, thread_environment(1), log, PATIENCE_S))
    fleet = EngineFleet([server], WatchPolicy(8, 3600.0))
    weights = EngineWeights(
        SimpleNamespace(
            pause_generation_mode="auto",
            check_weight_update_equal=False,
            weight_checksum_interval=1,
            timeouts={"update-weight": 60.0},
        ),
        prefix,
        ((),),
        fleet,
    )
    fleet.launch()
    try:
        fleet.wait_ready()
        yield fleet, weights
    finally:
        fleet.stop()
        shm.unlink_prefix(prefix)


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def served(request, tiny_folder):
    fleet, weights = request.getfixturevalue(
        {"embedded": "embedded_fleet", "sglang": "sglang_pair"}[request.param]
    )
    reset_breaker()
    yield fleet, weights, {"embedded": "shared_memory", "sglang": "http_tensor"}[request.param]
    begin_anew(fleet, weights, tiny_folder)


def begin_anew(fleet: EngineFleet, weights: EngineWeights, folder) -> None:
    weights._members.clear()
    for url in fleet.urls:
        run(EngineControl(url).update_from_disk(str(folder), "default"))


@pytest.fixture
def front(served) -> Iterator[tuple[Balancer, int]]:
    balancer = Balancer(served[0].urls)
    yield balancer, run(balancer.start())
    run(balancer.stop())


def in_background(work):
    """(thread, list that gets the result)."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def wait_for_requests(balancer: Balancer, evaluation: threading.Thread, count: int) -> None:
    """Wait until that many are under way and have a few tokens. An engine's own count may lag."""
    deadline = time.monotonic() + 120
    while sum(len(tasks) for tasks in balancer._running.values()) < count:
        met(evaluation.is_alive())
        assert time.monotonic() < deadline, "the requests did not reach the balancer"
        time.sleep(0.005)
    begun = time.monotonic() + 2
    while time.monotonic() < begun and not all(
        run(EngineControl(url).load())[0] for url in balancer._running
    ):
        time.sleep(0.005)
    time.sleep(0.1)


def stop_reporting_versions(weights, urls) -> None:
    """What an older engine would say of itself: a push aborts its requests, and they are sent again."""
    for url in urls:
        info = weights.info(url)
        silent = dataclasses.replace(info, dialect=dataclasses.replace(info.dialect, has_spans=False))
        weights._members[url] = dataclasses.replace(weights._members[url], info=silent)


def evaluation_flags(folder) -> tuple[str, ...]:
    data = write_prompts(folder / "held_out.jsonl", NUM_PROMPTS)
    entry = {"name": "held", "path": str(data), "custom_generate_function_path": "rollout_plugins.never_ends"}
    entry |= {"temperature": TEMPERATURE, "max_response_len": LENGTH}
    (folder / "eval.yaml").write_text(json.dumps({"datasets": [entry]}))
    return "--eval-config", str(folder / "eval.yaml"), "--eval-interval", "1"


def arguments(folder, port: int, urls, *flags: str):
    facts = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "engine_urls": urls,
        "rollout_num_engines": len(urls),
    }
    return make_args(folder, None, *flags, prompts=64, max_context_len=CONTEXT, **facts)


def assert_spans_cover(sample: Sample) -> None:
    """Every token has one version, and versions only go up."""
    assert sample.version_spans[0][1] == 0 and sample.version_spans[-1][2] == sample.response_length
    assert all(a[2] == b[1] for a, b in zip(sample.version_spans, sample.version_spans[1:], strict=False))
    order = ["default", "run:1", "run:2"]
    places = [order.index(version) for version, _, _ in sample.version_spans]
    assert places == sorted(places)


@pytest.mark.parametrize("spans", [True, False], ids=["spans", "resubmitted"])
def test_evaluation_goes_on_over_aborts_and_pushes_of_training(
    served, front, tmp_path, old_model, new_model, tiny_folder, spans
):
    until_met(
        lambda: check_evaluation(served, front, tmp_path, old_model, new_model, tiny_folder, spans),
        lambda: begin_anew(*served[:2], tiny_folder),
    )


def check_evaluation(served, front, tmp_path, old_model, new_model, tiny_folder, spans):
    (fleet, weights, transport), (balancer, port) = served, front
    if not spans:
        stop_reporting_versions(weights, fleet.urls)
    over = (
        "--rollout-batch-size",
        "2",
        "--over-sampling-batch-size",
        "6",
        "--rollout-max-response-len",
        "60",
    )
    args = arguments(tmp_path, port, fleet.urls, *evaluation_flags(tmp_path), *over)
    sender = transport_of(transport).make_sender(
        SenderOptions(weights._shm_prefix, tmp_path / "weights", str(tiny_folder))
    )
    source = make_source(args)
    evaluation, results = in_background(lambda: generate_rollout(args, 0, None, evaluation=True))
    wait_for_requests(balancer, evaluation, NUM_PROMPTS)
    for number, model in enumerate((new_model, old_model), 1):
        sender.send(list(model.state_dict().items()))
        assert weights.receive(sender.finish(f"run:{number}"))["perf/engines_evicted"] == 0
        if number == 1:
            output = generate_rollout(args, 0, source)  # its surplus is aborted beside the evaluation
            assert output.metrics["rollout/groups/returned"] > 0
            assert_conserved(source)
            met(evaluation.is_alive())
    evaluation.join(PATIENCE_S)
    held = results[0].data["held"]
    assert [s.index for s in held["samples"]] == list(range(NUM_PROMPTS))
    assert {s.status for s in held["samples"]} == {Sample.Status.TRUNCATED}
    assert all(s.response_length == LENGTH == len(s.rollout_log_probs) for s in held["samples"])
    assert held["rewards"] == [float(sum(s.tokens[-LENGTH:])) for s in held["samples"]]
    for sample in held["samples"]:
        assert_spans_cover(sample)
        prompt, ids = sample.tokens[:-LENGTH], sample.tokens[-LENGTH:]
        by_model = {
            version: plain_log_probs(model, prompt, ids, TEMPERATURE)
            for model, version in ((old_model, "default"), (new_model, "run:1"), (old_model, "run:2"))
        }
        expected = [
            by_model[version][i] for version, start, end in sample.version_spans for i in range(start, end)
        ]
        assert largest_difference(sample.rollout_log_probs, expected) < CLOSE / TEMPERATURE
    versions = {version for s in held["samples"] for version, _, _ in s.version_spans}
    met({"default", "run:1"} <= versions)
    assert results[0].metrics == {"eval/held/weight_versions": len(versions)}
    sender.close()
