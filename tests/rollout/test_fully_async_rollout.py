"""The fully asynchronous rollout function against a scripted engine over real HTTP."""

import threading
import time

import pytest
import rollout_plugins
from fake_engine import FakeEngine, sample_index
from patience import eventually
from rollout_helpers import assert_conserved, counts, make_args, make_source

from slime.arguments import parse_args
from slime.arguments.core.draft import ASYNCHRONOUS
from slime.arguments.rules import for_asynchronous_loop
from slime.rollout import fully_async_rollout
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection.collector import GroupFailed
from slime.rollout.collection.versions import PushPlan
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, restart_pool, stop_pool
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.utils.types import Sample, flatten_samples

FUNCTION = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def rollout(args, source, rollout_id=0):
    return call_rollout_fn(generate_rollout_fully_async, args, rollout_id, source, evaluation=False)


def ids(output):
    return [s.index for s in flatten_samples(output.samples)]


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("/seconds")}


def test_rollouts_fill_their_batches_and_nothing_is_left_after_the_last(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, num_rollout=5)
        source = make_source(args)
        outputs = [rollout(args, source, i) for i in range(5)]
    assert [len(output.samples) for output in outputs] == [4] * 5
    used = [i for output in outputs for i in ids(output)]
    assert len(set(used)) == len(used) == 40
    assert counts(source)["trained"] == 20 and counts(source)["new"] == 20
    assert_conserved(source)


def test_the_pool_goes_on_between_rollouts_and_starts_no_more_than_the_bound_lets_be_used(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, *FUNCTION, "--max-weight-staleness", "2", num_rollout=100)
        source = make_source(args)
        first = rollout(args, source)
        eventually(lambda: len(engine.requests) == 2 * (4 + 2 * 4))
        time.sleep(0.1)
        assert len(engine.requests) == 24  # two rollouts ahead, not more
        sent = {sample_index(r) for r in engine.requests} - set(ids(first))
        second = rollout(args, source, 1)
        assert set(ids(second)) <= sent  # made while nobody asked
        stop_pool(source)
    assert_conserved(source)


def test_what_was_begun_with_another_temperature_begins_again(tmp_path):
    def hold_late(payload, number):
        return {"hold": True, "tokens": [33]} if 12 <= number < 16 else None

    with FakeEngine(hold_late) as engine:
        args = make_args(tmp_path, engine, num_rollout=9)
        source = make_source(args)
        first = rollout(args, source)
        eventually(lambda: len(engine.requests) == 16 and engine.running == 4)  # some done, some in flight
        restart_pool(source)
        args.change("rollout_temperature", 0.5)
        second = rollout(args, source, 1)
        asked = [r["sampling_params"]["temperature"] for r in engine.requests]
        assert set(asked[:16]) == {1.0} and len(asked) >= 24 and set(asked[16:]) == {0.5}
        # Which of the groups end first is not said; those that have not are still there.
        assert len(set(ids(first) + ids(second))) == 16, "nothing is made twice"
        stop_pool(source)
    assert_conserved(source)


def test_without_staleness_nothing_is_generated_between_rollouts(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, *FUNCTION, "--max-weight-staleness", "0", num_rollout=9)
        source = make_source(args)
        for rollout_id in range(3):
            rollout(args, source, rollout_id)
            time.sleep(0.05)
            assert len(engine.requests) == 8 * (rollout_id + 1)
            engine.version = f"run:{rollout_id + 2}"
    assert counts(source)["trained"] == 12
    assert_conserved(source)


def test_the_concurrency_target_bounds_the_groups_in_flight(tmp_path):
    with FakeEngine(lambda payload, number: {"delay_s": 0.02}) as engine:
        flags = *FUNCTION, "--max-weight-staleness", "5", "--sglang-server-concurrency", "6"
        args = make_args(tmp_path, engine, *flags, num_rollout=3)
        source = make_source(args)
        for rollout_id in range(3):
            rollout(args, source, rollout_id)
    assert engine.most_running <= 6
    assert_conserved(source)


def test_a_finished_group_that_became_too_old_is_generated_again(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, num_rollout=9)
        source = make_source(args)
        first = rollout(args, source)  # of the groups that finished first, whichever they are
        eventually(lambda: len(engine.requests) == 16 and engine.running == 0)
        engine.version = "run:3"  # two pushes at once: the pool of version 1 is beyond the bound of 1
        output = rollout(args, source, 1)
        assert output.metrics["rollout/groups/stale"] == 4
        assert output.metrics["rollout/waste/stale/samples"] == 8
        assert output.metrics["rollout/waste/stale/tokens"] == 8 * 4
        assert output.metrics["rollout/waste/share"] == 0.5
        assert all(s.version_spans[0][0] == "run:3" for s in flatten_samples(output.samples))
        again = ids(output) + ids(rollout(args, source, 2))
        assert set(range(16)) - set(ids(first)) <= set(again)
        stop_pool(source)
    assert_conserved(source)


def test_in_the_overlapped_loop_the_bound_is_against_the_weights_that_are_trained(tmp_path):
    """Rollout r is made at version r (the first two at 1) and trained at r + 1: that push counts."""
    with FakeEngine() as engine:
        flags = *FUNCTION, "--max-weight-staleness", "1"
        args = make_args(tmp_path, engine, *flags, num_rollout=9, overlapped_loop=True)
        source = make_source(args)
        for rollout_id in range(5):
            engine.version = f"run:{max(1, rollout_id)}"
            output = rollout(args, source, rollout_id)
            trained = rollout_id + 1
            spans = [span for s in flatten_samples(output.samples) for span in s.version_spans]
            assert {trained - int(version.partition(":")[2]) for version, _, _ in spans} <= {0, 1}
            if rollout_id:
                # Admission: what is made now, beyond the batch, would be trained two pushes later.
                eventually(lambda: engine.running == 0)
                assert len(engine.requests) <= 8 * (rollout_id + 2)
        stop_pool(source)
    assert_conserved(source)


def test_in_the_overlapped_loop_what_a_push_made_too_old_is_generated_again(tmp_path):
    with FakeEngine() as engine:
        flags = *FUNCTION, "--max-weight-staleness", "2"
        args = make_args(tmp_path, engine, *flags, num_rollout=9, overlapped_loop=True)
        source = make_source(args)
        rollout(args, source)
        eventually(lambda: len(engine.requests) == 8 * 3 and engine.running == 0)  # two rollouts ahead
        engine.version = "run:2"  # trained at version 3: the pool of version 1 is just within 2
        assert "rollout/groups/stale" not in rollout(args, source, 1).metrics
        engine.version = "run:3"  # trained at version 4
        output = rollout(args, source, 2)
        assert output.metrics["rollout/groups/stale"] == 4
        assert all(s.version_spans[0][0] != "run:1" for s in flatten_samples(output.samples))
        stop_pool(source)
    assert_conserved(source)


def test_the_overlapped_loop_has_a_bound_of_its_own_and_refuses_none(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "a", "label": "b"}\n')
    words = (
        f"--hf-checkpoint none --prompt-data {data} --rm-type math --rollout-batch-size 4 --num-rollout 3 "
    )
    words += f"--n-samples-per-prompt 2 --rollout-max-response-len 8 {' '.join(FUNCTION)}"
    assert parse_args(words.split()).max_weight_staleness == 1
    assert parse_args(words.split(), training_loop=ASYNCHRONOUS).max_weight_staleness == 2
    chosen = parse_args([*words.split(), "--max-weight-staleness", "3"])
    assert for_asynchronous_loop(chosen).max_weight_staleness == 3
    none = [*words.split(), "--max-weight-staleness", "0"]
    with pytest.raises(ValueError, match="--max-weight-staleness is 0, but the asynchronous loop"):
        parse_args(none, training_loop=ASYNCHRONOUS)
    with pytest.raises(ValueError, match="--max-weight-staleness is 0, but the asynchronous loop"):
        for_asynchronous_loop(parse_args(none))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 4])
def test_the_plan_of_pushes_is_what_the_loops_do(overlapped, interval, start):
    """Both loops in a few lines, with a push where theirs is."""
    plan = PushPlan(overlapped, interval, start)
    pushes, held, trained = 1, {}, {}
    held[start] = pushes
    for rollout_id in range(start, start + 9):
        if overlapped:
            held[rollout_id + 1] = pushes
        trained[rollout_id] = pushes
        if not overlapped or (rollout_id + 1) % interval == 0:
            pushes += 1
        if not overlapped:
            held[rollout_id + 1] = pushes
    for making, first in held.items():
        for rollout_id in (n for n in trained if n >= making):
            assert plan.until(making, rollout_id) == trained[rollout_id] - first
            for bound in (0, 1, 2):
                within = trained[rollout_id] - first <= bound
                assert (rollout_id <= plan.last_within(making, bound)) == within


def test_a_group_in_flight_for_too_long_is_ended_and_after_its_attempts_leaves_the_run(tmp_path):
    def hold_the_first_prompt(payload, number):
        return {"hold": True, "tokens": [33]} if sample_index(payload) in (0, 1) else None

    with FakeEngine(hold_the_first_prompt) as engine:
        args = make_args(tmp_path, engine, num_rollout=99)
        source = make_source(args)
        wasted = 0
        for rollout_id in range(7):
            engine.version = f"run:{rollout_id + 1}"
            output = rollout(args, source, rollout_id)
            assert 0 not in ids(output)
            wasted += output.metrics["rollout/waste/stale/tokens"]
        assert len(engine.aborted) == 2 * 3  # two samples, three attempts
        assert wasted == 2 * 3  # the one token that each had made
        assert counts(source)["failed"] == 1
        stop_pool(source)
    assert_conserved(source)


def test_the_cursor_holds_finished_groups_as_finished_and_those_in_flight_as_prompts(tmp_path):
    def hold_late(payload, number):
        return {"hold": True, "tokens": [33]} if number >= 12 else None

    with FakeEngine(hold_late) as engine:
        args = make_args(tmp_path, engine, num_rollout=9)
        source = make_source(args)
        first = rollout(args, source)
        eventually(lambda: len(engine.requests) == 16 and engine.running == 4)
        cursor = fully_async_rollout._workers[
            id(source)
        ]._cursor()  # as the end of a rollout would take it now
        stop_pool(source)
    resumed = make_source(args)
    resumed.load_state_dict(cursor)
    assert_conserved(resumed)
    states = {s.index: (s.status, s.response_length) for s in flatten_samples(resumed.buffer)}
    assert set(states) == set(range(16)) - set(ids(first))
    done = [i for i, (status, _) in states.items() if status is Sample.Status.COMPLETED]
    fresh = [i for i, (status, length) in states.items() if status is Sample.Status.PENDING and length == 0]
    assert len(done) + len(fresh) == 8 and len(fresh) >= 4
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, num_rollout=3)
        output = rollout(args, resumed, 1)
        stop_pool(resumed)
    assert set(ids(output)) <= set(states)


def test_the_cursor_that_a_rollout_returns_contains_every_group_it_did_not_train(tmp_path):
    with FakeEngine(lambda payload, number: {"delay_s": 0.01 * (number % 5)}) as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8", num_rollout=6)
        source = make_source(args)
        trained = set()
        for rollout_id in range(6):
            output = rollout(args, source, rollout_id)
            trained |= set(ids(output))
            resumed = make_source(args)
            resumed.load_state_dict(output.cursor)
            held = {s.index for s in flatten_samples(resumed.buffer)}
            assert held.isdisjoint(trained)
            assert held | trained == set(range(resumed.sample_index))
            assert_conserved(resumed)


def test_in_deterministic_mode_two_runs_admit_and_use_the_same_whatever_the_timing(tmp_path):
    def used(delays):
        with FakeEngine(lambda payload, number: {"delay_s": delays[number % len(delays)]}) as engine:
            flags = *FUNCTION, "--max-weight-staleness", "2", "--deterministic-mode"
            args = make_args(tmp_path, engine, *flags, num_rollout=4)
            source, seen = make_source(args), []
            for rollout_id in range(4):
                engine.version = f"run:{rollout_id + 1}"
                output = rollout(args, source, rollout_id)
                spans = [s.version_spans for s in flatten_samples(output.samples)]
                seen.append((ids(output), spans, untimed(output.metrics)))
                assert engine.running == 0 or rollout_id == 3, "weights may change now"
            assert_conserved(source)
        return seen

    assert used([0.0]) == used([0.03, 0.0, 0.01])


def test_a_resumed_pool_holds_what_it_held_and_goes_on_as_if_nothing_had_been(tmp_path):
    with FakeEngine() as engine:
        flags = *FUNCTION, "--max-weight-staleness", "2", "--deterministic-mode"
        args = make_args(tmp_path, engine, *flags, num_rollout=5)
        source, outputs = make_source(args), []
        for rollout_id in range(5):
            engine.version = f"run:{rollout_id + 1}"
            outputs.append(rollout(args, source, rollout_id))
        resumed = make_source(args)
        resumed.load_state_dict(outputs[1].cursor)
        assert resumed.num_held == 8
        for rollout_id in range(2, 5):
            engine.version = f"run:{rollout_id + 1}"
            output = rollout(args, resumed, rollout_id)
            before = outputs[rollout_id]
            assert (ids(output), untimed(output.metrics)) == (ids(before), untimed(before.metrics))


def test_evaluation_goes_beside_the_pool(tmp_path):
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text('{"input": "e0", "label": "1"}\n')

    def hold_training(payload, number):
        return {"hold": True} if number >= 8 and payload["sampling_params"]["temperature"] == 1.0 else None

    with FakeEngine(hold_training) as engine:
        flags = (
            "--eval-prompt-data",
            "small",
            str(eval_file),
            "--eval-temperature",
            "0.5",
            "--eval-interval",
            "1",
        )
        args = make_args(tmp_path, engine, *flags, num_rollout=9)
        source = make_source(args)
        rollout(args, source)
        eventually(lambda: engine.running == 8)
        output = call_rollout_fn(generate_rollout_fully_async, args, 0, source, evaluation=True)
        assert len(output.data["small"]["rewards"]) == 1
        assert engine.running == 8 and engine.aborts == []  # the pool was not touched
        stop_pool(source)
    assert_conserved(source)


def test_filters_and_hooks_are_honoured(tmp_path):
    with FakeEngine() as engine:
        flags = (
            *("--dynamic-sampling-filter-path", "rollout_plugins.drop_every_third"),
            *("--rollout-sample-filter-path", "rollout_plugins.remove_first"),
            *("--rollout-all-samples-process-path", "rollout_plugins.see_all"),
            *("--rollout-sample-hook-path", "rollout_plugins.hook_in_place"),
        )
        args = make_args(tmp_path, engine, *flags, num_rollout=3)
        source = make_source(args)
        outputs = [rollout(args, source, i) for i in range(3)]
    assert all(s.group_index % 3 for output in outputs for s in flatten_samples(output.samples))
    assert all(output.samples[0][0].remove_sample for output in outputs)
    assert len(rollout_plugins.calls["see_all"]) == 3 and rollout_plugins.calls["hook_in_place"]
    assert counts(source)["filtered"] >= 3
    assert_conserved(source)


def test_a_failure_gives_everything_back_and_the_next_call_goes_on(tmp_path):
    broken = threading.Event()

    def script(payload, number):
        return 400 if broken.is_set() else None

    with FakeEngine(script) as engine:
        args = make_args(tmp_path, engine, num_rollout=9)
        source = make_source(args)
        trained = set(ids(rollout(args, source)))
        broken.set()
        with pytest.raises(Exception, match="answered 400"):
            for rollout_id in range(1, 4):  # what was finished before is used first
                trained |= set(ids(rollout(args, source, rollout_id)))
        assert_conserved(source)
        broken.clear()
        trained_before = set(trained)
        after = set(ids(rollout(args, source, 4)))
        assert after.isdisjoint(trained_before)
        stop_pool(source)
    assert_conserved(source)


def test_a_failed_reward_is_tried_again_and_stops_the_run_when_it_fails_for_ever(tmp_path):
    with FakeEngine() as engine:
        flags = ("--custom-rm-path", "rollout_plugins.fails_for_odd_groups", "--limits", "reward-retries=0")
        args = make_args(tmp_path, engine, *flags, num_rollout=99)
        source = make_source(args)
        with pytest.raises(GroupFailed, match="3 attempts were made"):
            for rollout_id in range(9):
                rollout(args, source, rollout_id)
    assert_conserved(source)


@pytest.mark.parametrize("flags", [("--partial-rollout",)])
def test_flags_that_contradict_the_pool_are_refused(tmp_path, flags):
    args = make_args(tmp_path, None, *flags, engine_urls=("http://127.0.0.1:9",))
    with pytest.raises(ValueError, match=flags[0]):
        rollout(args, make_source(args))


@pytest.mark.parametrize("flag", ["--partial-rollout", "--colocate"])
def test_such_flags_are_refused_when_they_are_parsed(tmp_path, flag):
    with pytest.raises(ValueError, match=f"{flag} with the fully asynchronous rollout function"):
        make_args(tmp_path, None, *FUNCTION, flag)


def test_a_staleness_bound_without_a_pool_is_refused(tmp_path):
    only = "--max-weight-staleness is 3, but it has an effect only with --rollout-function-path slime.rollout"
    with pytest.raises(ValueError, match=only):
        make_args(tmp_path, None, "--max-weight-staleness", "3")


def test_an_engine_that_sometimes_answers_garbage_or_500_loses_no_group(tmp_path):
    answers = {3: "<html>", 7: 500, 11: {"finish": "nonsense"}, 17: 503}
    with FakeEngine(lambda payload, number: answers.get(number)) as engine:
        args = make_args(tmp_path, engine, num_rollout=4)
        source = make_source(args)
        used = [i for rollout_id in range(4) for i in ids(rollout(args, source, rollout_id))]
    assert len(set(used)) == len(used) == 32
    assert_conserved(source)


def test_a_data_source_without_buffer_serves_a_pool_and_gives_up_nothing_that_is_wanted(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, num_rollout=3)
        source = RolloutDataSource(args)
        source.state_dict = None
        outputs = [rollout(args, source, i) for i in range(3)]
    assert all(output.cursor is None for output in outputs)
    assert source.journal.counts == {"new": 12, "trained": 12}


def test_a_data_source_whose_state_cannot_hold_the_pool_is_refused(tmp_path):
    args = make_args(tmp_path, None, engine_urls=("http://127.0.0.1:9",))
    with pytest.raises(ValueError, match="RolloutDataSource takes no `held`"):
        rollout(args, RolloutDataSource(args))
