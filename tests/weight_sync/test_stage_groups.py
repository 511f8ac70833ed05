"""Pipeline stages push side by side to real engine processes, while engines and senders die."""

import asyncio
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from devices import DEVICE
from engine_under_test import small_embedded_command
from patience import LONG_S, PATIENCE_S, eventually
from stage_rank import BUCKET, DEADLINE_S, StagePlace, buckets, stage_tensors
from stage_ranks import StageRanks
from tiny_model import make_tiny_model

from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import until
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.children import thread_environment
from slime.utils.machine.shared_gpu import nccl_on_one_gpu
from slime.weight_sync.base import LiveReport, SenderOptions, Target, WeightBundle
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.stage_turns import StageTurns
from slime.wire.control import EngineControl


def environment(name: str) -> dict[str, str]:
    return thread_environment(1) | ({} if DEVICE == "cpu" else nccl_on_one_gpu(name))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three checkpoints of one tiny model."""
    folder = tmp_path_factory.mktemp("stages")
    return [make_tiny_model(folder / f"model-{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    """(fleet of two engines, what keeps their weights)."""
    prefix = shm.make_prefix()
    command = small_embedded_command(models[0], prefix, device=DEVICE)
    logs = tmp_path_factory.mktemp("logs")
    plans = [
        LaunchPlan(f"engine-{i}", command, environment(f"engine-{i}"), logs / f"engine-{i}.log", PATIENCE_S)
        for i in range(2)
    ]
    args = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=1,
        timeouts={"update-weight": DEADLINE_S},
    )
    fleet = EngineFleet([EngineServer(plan) for plan in plans], WatchPolicy(8, 3600.0))
    weights = EngineWeights(args, prefix, ((), ()), fleet)
    fleet.launch()
    try:
        fleet.wait_ready()
        yield fleet, weights
    finally:
        fleet.stop()
        shm.unlink_prefix(prefix)


@pytest.fixture(scope="module")
def expected(served, models):
    """The engine's own checksums after it has loaded each model from disk."""
    control, sums = EngineControl(served[0].urls[0]), []
    for model in models:
        run(control.update_from_disk(str(model), "disk"))
        sums.append(run(control.checksums()))
    assert len({str(s) for s in sums}) == len(models)
    return sums


@pytest.fixture(scope="module")
def two_stages():
    ranks = StageRanks(2, 2)
    yield ranks
    ranks.stop()


def test_a_sender_that_hangs_is_named_by_those_who_wait_for_its_turn(models):
    ranks = StageRanks(2, 2, deadline_s=2)
    try:
        ranks.begin((), "run:1", models[0], stop_at=[0, 0])
        assert ranks.hear(0) == {"stopped": True}
        told = ranks.hear(1)["error"]
        assert (
            "trainer rank 0, which sends the weights of stage 0, did not finish its turn within 6 s" in told
        )
    finally:
        ranks.stop()


def held(fleet) -> list[tuple[str, dict]]:
    return [(run(EngineControl(url).version()), run(EngineControl(url).checksums())) for url in fleet.urls]


def copy_on_disk(version: str, model) -> WeightBundle:
    """What the trainer leaves for engines that a live push did not reach."""
    return WeightBundle(version, "disk", 0, 0, None, model)


def as_report(answer: dict) -> LiveReport:
    return LiveReport(answer["num_tensors"], answer["nbytes"], answer["failures"])


def finish(served, version: str, targets, answer: dict, model) -> dict:
    weights = served[1]
    weights.finish_live(version, targets, as_report(answer))
    return weights.receive(copy_on_disk(version, model))


class OneStage:
    """A trainer without a pipeline, in this process: it needs no other ranks, and no default group."""

    def __init__(self):
        os.environ.update(environment("one-stage"))
        self.sender = DistributedSender(
            SenderOptions("slime-x", Path("unused"), "model", deadline_s=DEADLINE_S)
        )

    def push(self, targets, version: str, model: Path) -> list[dict]:
        report = StageTurns(0, 1, self.sender).send(version, targets, buckets({"model": model}, StagePlace()))
        return [dataclasses.asdict(report)]


def test_a_rank_of_a_single_stage_that_sends_nothing_gathers_all_of_it_and_has_no_report():
    gathered = []
    assert StageTurns(0, 1, None).send("run:1", (), (gathered.append(i) or [] for i in range(3))) is None
    assert gathered == [0, 1, 2]


def test_a_broken_broadcast_names_who_failed_and_who_has_not_answered(monkeypatch):
    """Whoever has not answered may be the one that broke it, however long the message waits for answers."""
    left, sender = asyncio.Event(), OneStage().sender

    class Control:
        def __init__(self, fails):
            self.fails = fails

        async def update_from_group(self, *described):
            if self.fails:
                raise ConnectionError("reset by peer")
            await left.wait()

        async def leave_group(self, name):
            left.set()

    class Breaks:
        """A group that breaks once an engine has failed."""

        def broadcast(self, tensors, deadline_s, is_over):
            eventually(is_over)
            raise RuntimeError("timed out")

        def end(self):
            """Nothing to end."""

    monkeypatch.setattr(sender, "_controls", lambda *deadline: [Control(True), Control(False)])
    sender.open("run:1", (Target("http://a", 0, 1, ()), Target("http://b", 0, 1, ())))
    sender._group = Breaks()
    sender.send([("w", torch.zeros(2))])
    failures = sender.finish().failures
    assert failures["http://a"] == failures["http://b"]
    assert failures["http://a"].endswith(
        "engine http://a: ConnectionError: reset by peer; no reply by then from http://b"
    )


@pytest.mark.parametrize("num_stages, parallel", [(1, True), (2, True), (2, False)])
def test_engines_hold_after_a_push_by_stages_what_a_push_by_disk_gives(
    served, models, expected, two_stages, num_stages, parallel
):
    ranks = two_stages if num_stages == 2 else OneStage()
    for number, which in enumerate((1, 2)):  # the second time over the groups that stand
        version = f"run:{num_stages}{number}{'' if parallel else 9}"
        targets = served[1].begin_live()
        assert all(target.parallel_updates for target in targets)
        targets = tuple(dataclasses.replace(target, parallel_updates=parallel) for target in targets)
        answers = ranks.push(targets, version, models[which])
        assert answers[0]["failures"] == {} and answers[0]["num_tensors"] == len(expected[0])
        shares = answers[0]["rank_bytes"]
        assert len(shares) == num_stages and sum(shares.values()) == answers[0]["nbytes"]
        assert min(shares.values()) > 0
        if num_stages == 2:
            same = {key: value for key, value in answers[0].items() if key != "seconds"}
            assert same.items() <= answers[1].items(), "each sender tells of the whole push"
        assert [v for v, _ in held(served[0])] == [version] * 2
        assert finish(served, version, targets, answers[0], models[which])["perf/engines_evicted"] == 0
        assert held(served[0]) == [(version, expected[which])] * 2
    if num_stages == 1:
        ranks.sender.close()


@pytest.mark.parametrize("parallel, which", [(True, 0), (False, 1)])
def test_a_stage_sends_while_another_gathers_and_engines_serve_no_mixture(
    served, models, expected, two_stages, parallel, which
):
    """Stage 1 has sent its first bucket and gathers its second. Engines that receive side by side get all of
    stage 0 meanwhile; for others stage 0 waits with its third bucket for the turn of stage 1."""
    fleet, weights = served
    version = f"run:3{parallel:d}"
    before = run(EngineControl(fleet.urls[0]).version())
    targets = tuple(dataclasses.replace(target, parallel_updates=parallel) for target in weights.begin_live())
    first, second = ([name for name, _ in stage_tensors(models[which], stage, 2)] for stage in (0, 1))
    two_stages.begin(targets, version, models[which], stop_at=[1, 1])
    assert two_stages.hear(1) == {"stopped": True}

    def arrived() -> set[str]:
        sums = [run(EngineControl(url).checksums()) for url in fleet.urls]
        return {name for name in sums[0] if all(held[name] == expected[which][name] for held in sums)}

    sent = first if parallel else first[: 2 * BUCKET]
    until(lambda: {*sent, *second[:BUCKET]} <= arrived(), "the buckets of both stages", PATIENCE_S)
    assert not set(second[BUCKET:]) <= arrived()
    for url in fleet.urls:
        control = EngineControl(url)
        assert run(control.version()) == before, "half of the tensors are no version"
        run(control.resume())  # even when it is let go
        assert run(control.load()) == (0, 0) and run(control.healthy())
    two_stages.tell(1, {})
    answers = two_stages.hear_all()
    assert answers[0]["failures"] == {}
    finish(served, version, targets, answers[0], models[which])
    assert held(fleet) == [(version, expected[which])] * 2


def test_an_engine_that_dies_between_stages_is_named_and_evicted_and_joins_both_groups_again(
    served, models, expected, two_stages
):
    fleet, weights = served
    targets, restarts = weights.begin_live(), fleet.num_restarts
    two_stages.begin(targets, "run:40", models[2], stop_at=[1, 1])
    assert two_stages.hear(1) == {"stopped": True}
    psutil.Process(fleet.pids[1]).kill()
    two_stages.tell(1, {})
    answers = two_stages.hear_all()
    failures = answers[0]["failures"]
    assert failures.keys() == set(fleet.urls) and answers[0]["seconds"] < LONG_S
    assert failures == answers[1]["failures"], "all stages hear of it"
    assert "slime-pp_1" in failures[fleet.urls[0]] and fleet.urls[1] in failures[fleet.urls[0]]
    finish(served, "run:40", targets, answers[0], models[2])
    until(
        lambda: fleet.num_restarts == restarts + 1 and fleet.is_alive(fleet.urls[1]),
        "the engine to return",
        PATIENCE_S,
    )
    assert held(fleet) == [("run:40", expected[2])] * 2, (
        "the survivor took the copy, and the new one caught up"
    )
    targets = weights.begin_live()
    answers = two_stages.push(targets, "run:41", models[1])
    assert answers[0]["failures"] == {} and len(targets) == 2
    assert held(fleet) == [("run:41", expected[1])] * 2
    finish(served, "run:41", targets, answers[0], models[1])


@pytest.mark.slow
def test_an_engine_that_hangs_in_a_bucket_is_named_within_the_deadline_and_evicted(
    served, models, expected, two_stages
):
    fleet, weights = served
    targets, restarts = weights.begin_live(), fleet.num_restarts
    two_stages.begin(targets, "run:45", models[2], stop_at=[1, 1])
    assert two_stages.hear(1) == {"stopped": True}
    psutil.Process(fleet.pids[1]).suspend()
    two_stages.tell(1, {})
    answers = two_stages.hear_all()
    assert answers[0]["seconds"] < LONG_S
    # The other one may have waited for it inside the broadcast, and is
    # then named too; the copy tells them apart.
    assert f"not done after {DEADLINE_S}.0 s" in answers[0]["failures"][fleet.urls[1]]
    assert finish(served, "run:45", targets, answers[0], models[2])["perf/engines_evicted"] == 1
    until(
        lambda: fleet.num_restarts == restarts + 1 and fleet.is_alive(fleet.urls[1]),
        "the engine to return",
        PATIENCE_S,
    )
    assert held(fleet) == [("run:45", expected[2])] * 2


def test_a_sender_that_dies_in_a_bucket_ends_the_push_on_all_stages_and_leaves_engines_that_take_the_next(
    served, models, expected, two_stages
):
    """The last of this file: its ranks are gone afterwards."""
    fleet, weights = served
    targets = weights.begin_live()
    two_stages.begin(targets, "run:50", models[2], die_at=[1, 1])
    answer = two_stages.hear(0)
    assert "error" in answer and answer["seconds"] < LONG_S
    report = {"num_tensors": 0, "nbytes": 0, "failures": dict.fromkeys(fleet.urls, "the sender died")}
    assert finish(served, "run:50", targets, report, models[2])["perf/engines_evicted"] == 0
    assert held(fleet) == [("run:50", expected[2])] * 2
