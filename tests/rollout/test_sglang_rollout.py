"""The default rollout function against a scripted engine over real HTTP."""

import time

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from patience import LONG_S
from rollout_helpers import assert_conserved, counts, make_args, make_source

from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection.collector import GroupFailed
from slime.rollout.generation.generate_request import PromptError
from slime.rollout.rm_hub import RewardFailuresExceeded
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample, flatten_samples


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def rollout(args, source, rollout_id=0):
    return call_rollout_fn(generate_rollout, args, rollout_id, source, evaluation=False)


def test_a_batch_has_tokens_log_probs_versions_and_rewards(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        output = rollout(args, source)
    assert [len(group) for group in output.samples] == [2, 2, 2, 2]
    for sample in flatten_samples(output.samples):
        assert sample.response_length == 4 and len(sample.tokens) == 6
        assert sample.rollout_log_probs == [-0.5] * 4 and sample.loss_mask == [1] * 4
        assert sample.version_spans == [("run:1", 0, 4)] and sample.weight_versions == ["run:1"]
        assert sample.status is Sample.Status.COMPLETED
        assert sample.reward == sum(sample.tokens[2:]) and sample.response == "xxxx"
    assert counts(source) == {"new": 4, "trained": 4}
    assert_conserved(source)


def test_a_rerun_sends_the_same_seeds_and_every_sample_has_its_own(tmp_path):
    seeds = []
    for _ in range(2):
        with FakeEngine() as engine:
            args = make_args(tmp_path, engine)
            rollout(args, make_source(args))
            seeds.append(sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests))
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 8
    assert all(0 < seed < 2**31 for seed in seeds[0])


def test_concurrency_is_capped(tmp_path):
    def in_company(payload, number):  # the first wait for each other, however late one comes
        return {"delay_s": 0.05, "until": lambda: engine.most_running >= 3}

    with FakeEngine(in_company) as engine:
        args = make_args(tmp_path, engine, "--sglang-server-concurrency", "3")
        rollout(args, make_source(args))
    assert engine.most_running == 3


def test_filtered_groups_are_counted_and_replaced(tmp_path):
    with FakeEngine() as engine:
        args = make_args(
            tmp_path, engine, "--dynamic-sampling-filter-path", "rollout_plugins.drop_every_third"
        )
        source = make_source(args)
        output = rollout(args, source)
    assert len(output.samples) == 4
    assert all(s.group_index % 3 for s in flatten_samples(output.samples))
    assert output.metrics["rollout/dynamic_filter/drop_third"] == counts(source)["filtered"] >= 1
    assert_conserved(source)


def test_surplus_finished_groups_are_used_first_by_the_next_rollout(tmp_path):
    sent = num_new = 0

    def script(payload, number):
        """No answer before all requests of a rollout are there: one that is late would never be sent."""
        if 12 <= number < 16:
            return {"hold": True}
        return {"after": 16, "until": lambda: number < 12 or len(engine.requests) >= sent + num_new}

    with FakeEngine(script) as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8")
        source = make_source(args)
        first = rollout(args, source)
        assert_conserved(source)
        assert len(source.buffer) == 4 and counts(source)["returned"] == 4
        finished = [g for g in source.buffer if all(s.reward is not None for s in g)]
        assert all(s.metadata["start_rollout_id"] == 0 for s in flatten_samples(finished))
        sent, num_new = len(engine.requests), 2 * (8 - len(finished))
        second = rollout(args, source, 1)
        assert_conserved(source)
    used = {s.index for s in flatten_samples(second.samples)}
    assert used.isdisjoint({s.index for s in flatten_samples(first.samples)})
    assert {s.index for s in flatten_samples(finished)} <= used
    # what was finished was not generated again
    assert len(engine.requests) == sent + num_new


def hold_late(payload, number):
    return {"hold": True, "tokens": [33, 34]} if number >= 8 else {"after": 16}


def test_abort_goes_by_request_id_and_waits_for_nothing_that_is_discarded(tmp_path):
    with FakeEngine(hold_late) as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8")
        source = make_source(args)
        start = time.monotonic()
        rollout(args, source)
        assert time.monotonic() - start < LONG_S
        assert engine.aborted == {r["rid"] for r in engine.requests[8:]}
        assert not any("abort_all" in abort for abort in engine.aborts)
    assert len(source.buffer) == 4
    assert all(s.tokens == [] and s.status is Sample.Status.PENDING for s in flatten_samples(source.buffer))
    assert_conserved(source)


def test_an_engine_that_is_slow_to_abort_does_not_hold_up_the_batch(tmp_path):
    with FakeEngine(hold_late) as engine:
        engine.abort_delay_s = 2 * LONG_S
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8")
        source = make_source(args)
        start = time.monotonic()
        rollout(args, source)
        assert time.monotonic() - start < LONG_S
        assert engine.aborts
    assert len(source.buffer) == 4
    assert_conserved(source)


def test_partial_rollout_continues_what_was_aborted(tmp_path):
    with FakeEngine(hold_late) as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8", "--partial-rollout")
        source = make_source(args)
        rollout(args, source)
        partial = flatten_samples(source.buffer)
        assert len(partial) == 8
        assert all(s.status is Sample.Status.ABORTED and s.tokens[2:] == [33, 34] for s in partial)
        assert all(s.metadata["start_rollout_id"] == 0 and s.reward is None for s in partial)
        engine.script, engine.version = None, "run:2"
        sent = len(engine.requests)
        args.over_sampling_batch_size = args.rollout_batch_size  # no others that could end before them
        output = rollout(args, source, 1)
    samples = flatten_samples(output.samples)
    assert {s.index for s in samples} == {s.index for s in partial}
    assert all(s.tokens[2:4] == [33, 34] and s.response_length == 6 for s in samples)
    assert all(s.version_spans == [("run:1", 0, 2), ("run:2", 2, 6)] for s in samples)
    assert all(s.loss_mask == [1] * 6 for s in samples)
    requests = [r for r in engine.requests[sent:] if r["input_ids"][2:] == [33, 34]]
    assert len(requests) == 8 and all(r["sampling_params"]["max_new_tokens"] == 6 for r in requests)
    assert_conserved(source)


def test_earlier_tokens_can_be_masked(tmp_path):
    with FakeEngine(hold_late) as engine:
        flags = (
            "--over-sampling-batch-size",
            "8",
            "--partial-rollout",
            "--mask-offpolicy-in-partial-rollout",
        )
        args = make_args(tmp_path, engine, *flags)
        source = make_source(args)
        rollout(args, source)
        engine.script = None
        args.over_sampling_batch_size = args.rollout_batch_size
        output = rollout(args, source, 1)
    assert all(s.loss_mask == [0, 0, 1, 1, 1, 1] for s in flatten_samples(output.samples))


def test_an_abort_that_is_not_ours_is_continued_from_what_was_made(tmp_path):
    def paused(payload, number):
        return {"tokens": [40], "finish": "abort"} if number < 8 else None

    with FakeEngine(paused) as engine:
        args = make_args(tmp_path, engine)
        output = rollout(args, make_source(args))
    assert all(s.tokens[2] == 40 and s.response_length == 5 for s in flatten_samples(output.samples))
    assert all(s.status is Sample.Status.COMPLETED for s in flatten_samples(output.samples))


def test_deterministic_batches_do_not_depend_on_timing(tmp_path):
    batches = []
    for slow in (0, 1):
        with FakeEngine(
            lambda payload, number, slow=slow: {"delay_s": 0.1 if number % 2 == slow else 0}
        ) as engine:
            flags = (
                "--over-sampling-batch-size",
                "6",
                "--deterministic-mode",
                "--dynamic-sampling-filter-path",
            )
            args = make_args(tmp_path, engine, *flags, "rollout_plugins.drop_every_third")
            source = make_source(args)
            outputs = [rollout(args, source, i) for i in range(2)]
            batches.append([[(s.index, s.tokens) for s in flatten_samples(o.samples)] for o in outputs])
            assert_conserved(source)
    assert batches[0] == batches[1]


def test_server_errors_are_retried(tmp_path):
    with FakeEngine(lambda payload, number: 500 if number < 3 else None) as engine:
        args = make_args(tmp_path, engine)
        output = rollout(args, make_source(args))
    assert len(engine.requests) == 8 + 3 and len(flatten_samples(output.samples)) == 8


def test_a_garbage_answer_is_tried_again_from_the_prompt(tmp_path):
    with FakeEngine(lambda payload, number: "<html>proxy</html>" if number in (0, 5) else None) as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        output = rollout(args, source)
    assert all(s.response_length == 4 for s in flatten_samples(output.samples))
    assert_conserved(source)


def answer(tokens: list[int], log_probs: list[float], named: list[int] | None = None) -> dict:
    triples = [[value, token, None] for value, token in zip(log_probs, named or tokens, strict=True)]
    return {"tokens": tokens, "meta": {"output_token_logprobs": triples}}


IMPOSSIBLE = {
    "log-probs that are no numbers": answer([20, 21], [-0.5, float("nan")]),
    "or of a token that cannot be": answer([20, 21], [-0.5, float("-inf")]),
    "a log-prob of 3.0": answer([20], [3.0]),
    "token id 5000 in a vocabulary of 128": answer([20, 5000], [-0.5, -0.5]),
    "-1 is no token id": answer([-1], [-0.5]),
    "of other tokens than output_ids": answer([20, 21], [-0.5, -0.5], named=[20, 22]),
    "9 tokens where 8 were asked for": answer([20] * 9, [-0.5] * 9),
    "no token, although it says 'stop'": {"tokens": [], "finish": "stop"},
}


# A name of other releases for the default.
OTHER_NAME = "slime.rollout.sglang_streaming_rollout.generate_streaming"


@pytest.mark.parametrize(
    ("complaint", "generate"),
    [*((each, None) for each in IMPOSSIBLE), ("token id 5000 in a vocabulary of 128", OTHER_NAME)],
)
def test_an_impossible_answer_is_asked_for_again_and_never_trained_on(tmp_path, caplog, complaint, generate):
    with FakeEngine(lambda payload, number: IMPOSSIBLE[complaint] if number == 0 else None) as engine:
        args = make_args(
            tmp_path, engine, *(("--custom-generate-function-path", generate) if generate else ())
        )
        source = make_source(args)
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
    assert complaint in caplog.text
    assert len(samples) == 8 and len(engine.requests) == 9
    assert all(s.response_length == 4 and s.rollout_log_probs == [-0.5] * 4 for s in samples)
    assert_conserved(source)


def test_garbage_for_ever_stops_the_run_and_loses_nothing(tmp_path):
    with FakeEngine(lambda payload, number: "nonsense") as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        with pytest.raises(GroupFailed, match=r"failed .*no generation: 'nonsense'\); 3 attempts were made"):
            rollout(args, source)
    assert len(source.buffer) == 4 and all(s.tokens == [] for s in flatten_samples(source.buffer))
    assert_conserved(source)


def test_a_client_error_is_not_retried(tmp_path):
    with FakeEngine(lambda payload, number: 400, takes_groups=False) as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        with pytest.raises(HttpError, match="answered 400"):
            rollout(args, source)
        assert len(engine.requests) <= 8
    assert_conserved(source)


def test_a_prompt_beyond_the_context_is_named_before_it_is_sent(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, max_context_len=2)
        source = make_source(args)
        with pytest.raises(PromptError, match=r"sample 0 \(group 0\) has 2 tokens, the model's context is 2"):
            rollout(args, source)
        assert engine.requests == []
    assert_conserved(source)


def test_a_token_outside_the_vocabulary_is_named_before_it_is_sent(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, vocab_size=6)
        with pytest.raises(PromptError, match=r"token id \d+, the model's vocabulary has 6 ids"):
            rollout(args, make_source(args))
        assert engine.requests == []


def test_the_response_is_clamped_to_the_context(tmp_path):
    with FakeEngine(num_tokens=50) as engine:
        args = make_args(tmp_path, engine, "--rollout-max-context-len", "5")
        output = rollout(args, make_source(args))
    assert {r["sampling_params"]["max_new_tokens"] for r in engine.requests} == {3}
    assert all(
        s.status is Sample.Status.TRUNCATED and len(s.tokens) == 5 for s in flatten_samples(output.samples)
    )


def test_a_failed_reward_is_generated_again_with_another_seed(tmp_path):
    with FakeEngine() as engine:
        args = make_args(
            tmp_path, engine, "--custom-rm-path", "rollout_plugins.fails_once", "--limits", "reward-retries=0"
        )
        source = make_source(args)
        output = rollout(args, source)
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    assert len(set(seeds)) == len(seeds)
    assert output.metrics["rollout/groups/reward_infra_error"] == 1
    assert all(s.reward == 1.0 and s.reward_failure is None for s in flatten_samples(output.samples))
    assert_conserved(source)


def test_a_reward_that_fails_for_ever_stops_the_run_with_the_cause(tmp_path):
    with FakeEngine() as engine:
        flags = ("--custom-rm-path", "rollout_plugins.fails_for_odd_groups", "--limits", "reward-retries=0")
        args = make_args(tmp_path, engine, *flags)
        source = make_source(args)
        with pytest.raises(
            GroupFailed, match=r"is invalid: odd; 3 attempts were made.*--reward-failure-action drop"
        ):
            for rollout_id in range(5):  # its attempts may be spread over rollouts
                rollout(args, source, rollout_id)
    assert_conserved(source)


def test_groups_without_reward_can_be_dropped_and_are_counted(tmp_path):
    with FakeEngine() as engine:
        flags = ("--custom-rm-path", "rollout_plugins.fails_for_odd_groups", "--limits", "reward-retries=0")
        args = make_args(tmp_path, engine, *flags, "--reward-failure-action", "drop")
        source = make_source(args)
        output = rollout(args, source)
    assert all(s.group_index % 2 == 0 for s in flatten_samples(output.samples))
    assert counts(source)["failed"] >= 2
    assert_conserved(source)


def test_rewards_that_all_fail_trip_the_breaker(tmp_path):
    with FakeEngine() as engine:
        flags = ("--custom-rm-path", "rollout_plugins.always_fails", "--limits", "reward-retries=0")
        args = make_args(tmp_path, engine, *flags, "--limits", "reward-failures=5")
        source = make_source(args)
        with pytest.raises(RewardFailuresExceeded, match="judge is down"):
            rollout(args, source)
    assert_conserved(source)


def test_a_dead_engine_is_an_error_with_a_deadline(tmp_path):
    with FakeEngine(lambda payload, number: {"delay_s": 60}) as engine:
        args = make_args(tmp_path, engine, "--timeouts", "generate=0.2")
        source = make_source(args)
        with pytest.raises(GroupFailed, match=r"not done after 0\.2 s"):
            rollout(args, source)
    assert_conserved(source)
