"""An exception inside a step ends the requests of that step, with its cause, and nothing else."""

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from slime.engines.embedded.engine import Engine
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import Detokenizer
from slime.wire.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, context=256)


@pytest.fixture
def engine(folder) -> Engine:
    runner = ModelRunner(str(folder), device="cpu", dtype="float32", max_running=2, max_total_tokens=512)
    return Engine(runner, Detokenizer.load(str(folder)), max_running=2)


def request(rid: str, *, scored: bool = False, **sampling) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **sampling})
    return Sequence(rid, [5, 6, 7], params, seed=1, max_new_tokens=20, stop_ids=frozenset(), scored=scored)


def finish(engine: Engine, sequence: Sequence) -> None:
    for _ in range(100):
        if sequence.done:
            return
        engine.step()
    raise AssertionError("it does not end")


def fails_once(method):
    """`method`, whose first call raises."""
    calls = []

    def call(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return method(*args, **options)

    return call


def assert_well(engine: Engine) -> None:
    last = request("last")
    engine.add(last)
    finish(engine, last)
    assert last.finish == {"type": "length", "length": 20} and len(last.output) == 20
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert sorted(engine.scheduler._free_slots) == [0, 1]


def test_a_pass_that_raises_fails_its_requests_and_those_that_wait_are_served(engine):
    one, two, waiting = requests = [request(rid) for rid in ("one", "two", "waiting")]
    for sequence in requests:
        engine.add(sequence)
    engine.step()
    engine.runner.forward = fails_once(engine.runner.forward)
    assert engine.step() == [one, two]
    for sequence in (one, two):
        assert sequence.failed and sequence.finish["status_code"] == 500
        assert "RuntimeError: out of luck" in sequence.finish["message"]
    finish(engine, waiting)
    assert not waiting.failed and len(waiting.output) == 20
    assert_well(engine)


def test_a_score_that_raises_fails_itself(engine):
    scored, other = request("scored", scored=True), request("other")
    engine.add(scored)
    engine.add(other)
    engine.runner.score = fails_once(engine.runner.score)
    assert engine.step() == [scored] and scored.failed
    finish(engine, other)
    assert not other.failed
    assert_well(engine)


@pytest.mark.parametrize("place", ["_grow_running", "layout.lay_out", "layout._sample_rows"])
def test_a_pass_that_cannot_be_laid_out_fails_who_is_queued_and_the_queues_begin_anew(engine, place):
    requests = [request(str(i)) for i in range(3)]
    for sequence in requests:
        engine.add(sequence)
    engine.step()
    owner, name = (engine.scheduler.layout if "." in place else engine.scheduler), place.rpartition(".")[2]
    setattr(owner, name, fails_once(getattr(owner, name)))
    assert set(engine.step()) == set(requests)
    assert all(sequence.failed for sequence in requests)
    assert_well(engine)


def test_a_request_that_cannot_be_admitted_is_not_forgotten(engine):
    one = request("one")
    engine.add(one)
    engine.scheduler._slots.fill = fails_once(engine.scheduler._slots.fill)
    assert engine.step() == [one] and one.failed
    assert_well(engine)


def test_what_fails_after_the_pass_is_heard_by_all_of_it(engine):
    ended, stopped = request("ended"), request("stopped", stop=("x",))
    ended.max_new_tokens = 1
    for sequence in (ended, stopped):
        engine.add(sequence)
    engine.detokenizer.find_stop = fails_once(engine.detokenizer.find_stop)
    assert set(engine.step()) == {ended, stopped}
    assert ended.finish == {"type": "length", "length": 1} and stopped.failed
    assert_well(engine)


def test_logits_that_are_no_numbers_spoil_no_page_for_the_next_request(engine):
    bad = request("bad")
    engine.add(bad)
    engine.step()
    for values in engine.runner.pool.values.values():
        values.fill_(float("nan"))
    finish(engine, bad)
    assert bad.finish["status_code"] == 422 and "not finite" in bad.finish["message"]
    assert_well(engine)


def test_ids_to_draw_from_that_are_too_many_to_tell_fail_their_request_alone(engine, monkeypatch):
    monkeypatch.setattr("slime.engines.embedded.engine.MAX_KEPT_IDS", 500)
    wide, narrow = (
        request(rid, temperature=1e6, top_k=top_k, return_top_p_token_ids=True)
        for rid, top_k in (("wide", 120), ("narrow", 5))
    )
    for sequence in (wide, narrow):
        engine.add(sequence)
    finish(engine, wide)
    assert wide.finish["status_code"] == 422 and len(wide.output) == 5
    finish(engine, narrow)
    assert not narrow.failed and narrow.num_retractions == 0 and narrow.num_kept_ids == 100
    assert_well(engine)


def test_an_engine_whose_device_is_lost_does_not_go_on(engine):
    engine.add(request("one"))
    engine.runner.forward = fails_once(engine.runner.forward)

    def lost():
        raise RuntimeError("the device answers to nothing")

    engine.runner.check_device = lost
    with pytest.raises(RuntimeError, match="answers to nothing"):
        engine.step()
