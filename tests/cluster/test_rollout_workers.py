"""Rollout workers make what the driver would make; one that is killed is replaced."""

import contextlib
import os
import signal
import threading

import pytest
from balancer_world import balanced, member
from fake_engine import FakeEngine, sample_index
from ledger_world import World
from patience import eventually
from rollout_helpers import assert_conserved, counts, make_run, make_source, workers_of, write_prompts

from slime.arguments import plugin_args
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.record import LedgerReader
from slime.rollout import ledger
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection.collector import is_permanent
from slime.rollout.data_source import follow
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample, flatten_samples

LONG = ("--rollout-max-response-len", "100", "--deterministic-mode")
WORKERS = ("--rollout-workers", "2")
OF_THE_CALL = ("session_id", "trace")  # what differs between any two runs


def rollout(args, source, rollout_id=0, function=generate_rollout):
    return call_rollout_fn(function, args, rollout_id, source, evaluation=False)


def values(output):
    found = [sample.to_dict() for sample in flatten_samples(output.samples)]
    return [{name: value for name, value in one.items() if name not in OF_THE_CALL} for one in found]


@contextlib.contextmanager
def recorded(folder, args):
    """A ledger for the rollout functions of this process, and a source that reports to it."""
    world = World(folder)
    durable = world.start()
    durable.begin(0, "run:1")
    ledger.use(durable)
    source = make_source(args)
    follow(source, durable)
    try:
        yield durable, source
    finally:
        ledger.use(None)
        world.stop()


def events(folder, *kinds):
    with LedgerReader(folder / "record.db") as reader:
        return [(row.event, row.group_index, row.value) for row in reader.events() if row.event in kinds]


def hold_late(payload, number):
    """Answer the first four groups, and later the next four, when they continue their responses."""
    index = sample_index(payload)
    if index < 8:
        return {"after": 16}
    is_continued = index < 16 and len(payload["input_ids"]) > 2
    return None if is_continued else {"hold": True, "tokens": [33, 34]}


def test_two_workers_make_the_samples_of_one_process_and_tell_the_ledger(tmp_path):
    with FakeEngine(num_tokens=80) as engine:
        args, info = make_run(tmp_path, engine, *LONG, *WORKERS, max_context_len=256)
        namespace = plugin_args(args, info)
        here = values(rollout(namespace, make_source(namespace)))
        with (
            recorded(tmp_path, namespace) as (durable, source),
            workers_of(tmp_path, args, info, durable) as workers,
        ):
            output = rollout(namespace, source)
            assert all(not worker.jobs for worker in workers._workers)
    assert values(output) == here and len(here) == 8 and here[0]["response_length"] == 80
    assert all(sample.effective_response_length == 80 for sample in flatten_samples(output.samples))
    assert counts(source) == {"new": 4, "trained": 4} and len(engine.requests) == 16
    assert output.metrics["rollout/waste/share"] == 0.0
    with LedgerReader(tmp_path / "record.db") as reader:
        finished = reader.finished_entries("s")
    assert sorted(key[0] for key in finished) == list(range(8))


def test_a_killed_worker_is_replaced_and_its_groups_are_made_again(tmp_path, caplog):
    killed = threading.Event()

    def wait_for_the_kill(payload, number):
        return {"until": killed.is_set} if number >= 8 else None

    with FakeEngine(wait_for_the_kill) as engine:
        args, info = make_run(tmp_path, engine, *WORKERS, "--deterministic-mode")
        namespace = plugin_args(args, info)
        here = values(rollout(namespace, make_source(namespace)))
        with (
            recorded(tmp_path, namespace) as (durable, source),
            workers_of(tmp_path, args, info, durable) as workers,
        ):
            first = workers._workers[0]

            def kill():
                eventually(lambda: len(engine.requests) == 16)
                os.kill(first.handle.pid, signal.SIGKILL)
                eventually(lambda: "rollout-worker-0 ended while it had 2 groups" in caplog.text)
                killed.set()

            killer = threading.Thread(target=kill)
            killer.start()
            output = rollout(namespace, source)
            killer.join()
            assert values(rollout(namespace, make_source(namespace))) == here  # the new process works
    assert values(output) == here
    assert counts(source) == {"new": 4, "trained": 4}
    assert_conserved(source)
    restarted = events(tmp_path, "returned")
    assert len(restarted) == 2 and {value for _, _, value in restarted} == {"rollout-worker-0 ended"}
    again = [group for _, group, value in events(tmp_path, "issued") if value == "buffer"]
    assert again == [group for _, group, _ in restarted]


def test_surplus_requests_of_workers_are_aborted_and_partial_responses_continue(tmp_path):
    with FakeEngine(hold_late) as engine:
        flags = ("--over-sampling-batch-size", "8", "--partial-rollout")
        args, info = make_run(tmp_path, engine, *flags, *WORKERS)
        namespace = plugin_args(args, info)
        source = make_source(namespace)
        with workers_of(tmp_path, args, info):
            rollout(namespace, source)
            late = {request["rid"] for request in engine.requests if sample_index(request) >= 8}
            assert engine.aborted == late and len(late) == 8
            kept = flatten_samples(source.buffer)
            assert [sample.response_length for sample in kept] == [2] * 8
            assert all(sample.status is Sample.Status.ABORTED for sample in kept)
            second = rollout(namespace, source, 1)
    assert all(sample.response_length == 6 for sample in flatten_samples(second.samples))
    assert_conserved(source)


def test_workers_spread_requests_themselves_over_the_engines_that_are_in_rotation(tmp_path):
    with FakeEngine() as first, FakeEngine() as second, balanced([first.url]) as (address, balancer):
        port = int(address.rpartition(":")[2])
        facts = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
        args, info = make_run(tmp_path, None, *WORKERS, **facts, engine_urls=(first.url, second.url))
        namespace = plugin_args(args, info)
        asked = []
        balancer._send_somewhere = asked.append  # a request here would be an error
        with workers_of(tmp_path, args, info, balancers={("127.0.0.1", port): balancer}) as workers:
            rollout(namespace, make_source(namespace))
            assert (len(first.requests), len(second.requests)) == (8, 0)
            assert workers._is_anywhere, "only its own load balancer has an address of this host"
            balancer.add(member(second.url))
            rollout(namespace, make_source(namespace))
            assert len(first.requests) > 8 and second.requests
            balancer.remove(first.url)
            before = len(first.requests)
            os.kill(workers._workers[0].handle.pid, signal.SIGKILL)
            rollout(namespace, make_source(namespace))
    assert len(first.requests) == before and not asked


def test_an_error_in_a_worker_is_the_error_of_the_rollout(tmp_path):
    with FakeEngine(lambda payload, number: 400) as engine:
        args, info = make_run(tmp_path, engine, *WORKERS)
        with workers_of(tmp_path, args, info), pytest.raises(HttpError) as caught:
            rollout(plugin_args(args, info), make_source(plugin_args(args, info)))
    assert is_permanent(caught.value) and "in a worker process" in caught.value.__notes__[0]


def test_the_pool_and_an_evaluation_use_workers(tmp_path):
    """In deterministic mode, so that both ways make the same."""
    pool = ("--rollout-function-path", FULLY_ASYNC_ROLLOUT_FUNCTION, "--max-weight-staleness", "1")
    evaluation = (
        "--eval-prompt-data",
        "q",
        str(write_prompts(tmp_path / "e.jsonl", 3)),
        "--eval-interval",
        "1",
    )
    with FakeEngine() as engine:
        flags = (*pool, *evaluation, "--deterministic-mode", *WORKERS)
        args, info = make_run(tmp_path, engine, *flags, num_rollout=3)
        namespace = plugin_args(args, info)

        def results():
            source = make_source(namespace)
            made = [rollout(namespace, source, number, generate_rollout_fully_async) for number in range(3)]
            assert_conserved(source)
            evaluated = generate_rollout(namespace, 0, None, evaluation=True).data["q"]
            return [values(output) for output in made], evaluated["rewards"]

        here = results()
        with workers_of(tmp_path, args, info):
            assert results() == here


def test_a_changed_setting_reaches_workers_and_those_that_replace_them(tmp_path):
    with FakeEngine() as engine:
        args, info = make_run(tmp_path, engine, *WORKERS)
        namespace = plugin_args(args, info)
        with workers_of(tmp_path, args, info) as workers:
            namespace.change("rollout_temperature", 0.5)
            workers.change("rollout_temperature", 0.5)
            assert not workers._is_anywhere, "the engine listens on loopback"
            rollout(namespace, make_source(namespace))
            assert workers._settings.changes == {"rollout_temperature": 0.5}
    assert {request["sampling_params"]["temperature"] for request in engine.requests} == {0.5}


GENERATE = """
import os

from slime.rollout.sglang_rollout import generate as plain


async def generate(args, sample, sampling_params):
    sample.metadata.setdefault("pids", []).append(os.getpid())
    return await plain(args, sample, sampling_params)
"""


def test_a_generate_function_runs_in_workers_and_an_aborted_sample_returns_to_its_own(tmp_path):
    """What waits for the next rollout, like the episode of an agent, is in the process that began it."""

    (tmp_path / "mine.py").write_text(GENERATE)
    with FakeEngine(hold_late) as engine:
        flags = ("--over-sampling-batch-size", "8", "--partial-rollout")
        flags += ("--custom-generate-function-path", f"{tmp_path}/mine.py:generate")
        args, info = make_run(tmp_path, engine, *flags, "--rollout-workers", "3")
        namespace = plugin_args(args, info)
        source = make_source(namespace)
        with workers_of(tmp_path, args, info):
            first = flatten_samples(rollout(namespace, source).samples)
            second = flatten_samples(rollout(namespace, source, 1).samples)
    used = [sample.metadata["pids"] for sample in first]
    assert os.getpid() not in {pid for pids in used for pid in pids} and all(len(pids) == 1 for pids in used)
    continued = [sample.metadata["pids"] for sample in second]
    assert all(len(pids) == 2 and pids[0] == pids[1] for pids in continued)
    assert len({pids[0] for pids in used + continued}) == 3
