"""score_samples: retries, the breaker, custom and group rewards."""

import asyncio
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from argument_helpers import declared
from patience import LONG_S, PATIENCE_S, longer_each_time

from slime.catalog.rewards import REWARDS, Reward
from slime.rollout.rm_hub import (
    RewardConfigError,
    RewardFailuresExceeded,
    batched_async_rm,
    score_samples,
)
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.rm_hub.workers.check_pool import close_pools, get_pool
from slime.utils.async_utils import run
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample, invalid

CALLS = []


@pytest.fixture(autouse=True)
def _fresh():
    CALLS.clear()
    calls_of(here("length_reward")).clear()
    reset_breaker()


def make_args(**changes):
    return declared(**{"timeouts": {"reward": LONG_S, "generate": PATIENCE_S}, **changes})


def here(name):
    return f"{__file__}:{name}"


def calls_of(path):
    """The list that the functions loaded from this file append to
    (the plug-in loader imports a copy of it).
    """
    from slime.utils.misc import load_function

    return load_function(path).__globals__["CALLS"]


async def length_reward(args, sample):
    CALLS.append(sample.index)
    return float(len(sample.response))


def plain_reward(args, sample):
    CALLS.append(threading.current_thread() is threading.main_thread())
    return 2


async def raising_reward(args, sample):
    CALLS.append(sample.index)
    raise KeyError("no such judge")


async def unreachable_reward(args, sample):
    raise ConnectionError("no such judge")


class HttpProblem(Exception):
    """As libraries have: neither a kind of OSError nor a mistake of the code."""


async def given_reward(args, sample):
    CALLS.append(sample.index)
    return args.given


async def given_raise(args, sample):
    CALLS.append(sample.index)
    raise args.given


async def cancelled_reward(args, sample):
    task = asyncio.ensure_future(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def exiting_reward(args, sample):
    sys.exit(3)


def exiting_plain_reward(args, sample):
    sys.exit(3)


def stop_iteration_plain_reward(args, sample):
    return next(iter([]))


class Panic(BaseException):
    """What a library written in Rust raises."""


def panicking_plain_reward(args, sample):
    raise Panic("index out of bounds")


async def panicking_reward(args, sample):
    raise Panic("index out of bounds")


def interrupted_plain_reward(args, sample):
    raise KeyboardInterrupt


async def interrupted_reward(args, sample):
    raise KeyboardInterrupt


async def flaky_reward(args, sample):
    CALLS.append(sample.index)
    if len(CALLS) < 3:
        raise ConnectionError("judge away")
    return 1.0


async def hanging_reward(args, sample):
    await asyncio.sleep(2 * LONG_S)


def hanging_plain_reward(args, sample):
    time.sleep(5)


async def own_timeout_reward(args, sample):
    raise TimeoutError("upstream judge")


async def endless_reward(args, sample, *, response):
    CALLS.append(sample.index)
    return await get_pool(args).check("re:match", r"(a+)+$", "a" * 60 + "b")


async def group_reward(args, samples):
    CALLS.append([s.index for s in samples])
    return [1.0 if s is samples[0] else 0.0 for s in samples]


async def short_group_reward(args, samples):
    return [1.0]


async def single_group_reward(args, samples):
    return 1.0


async def text_group_reward(args, samples):
    return "10"


async def half_group_reward(args, samples):
    return [1.0, None]


def score(args, *samples, **kwargs):
    asyncio.run(score_samples(args, list(samples), **kwargs))


# Custom rewards
def test_single_signature_holds_for_fan_out_lists():
    samples = [
        Sample(index=0, response="a"),
        [Sample(index=1, response="bb"), Sample(index=2, response="ccc")],
    ]
    asyncio.run(score_samples(make_args(custom_rm_path=here("length_reward")), samples))
    assert [samples[0].reward, samples[1][0].reward, samples[1][1].reward] == [1.0, 2.0, 3.0]


def test_scoring_is_a_span_of_the_sample_s_trace():
    sample = Sample(index=0, response="a")
    score(make_args(custom_rm_path=here("length_reward")), sample)
    assert [span["name"] for span in sample.trace["spans"]] == ["reward_model"]


def test_sample_that_has_a_reward_keeps_it():
    sample = Sample(index=0, response="abc", reward=0.25)
    score(make_args(custom_rm_path=here("length_reward")), sample)
    assert sample.reward == 0.25 and calls_of(here("length_reward")) == []


def test_plain_function_runs_beside_the_loop():
    sample = Sample(index=0)
    score(make_args(custom_rm_path=here("plain_reward")), sample)
    assert sample.reward == 2
    assert calls_of(here("plain_reward"))[-1] is False


def test_sample_path_wins_over_the_run_path():
    sample = Sample(index=0, response="abcd", custom_rm_path=here("length_reward"))
    score(make_args(custom_rm_path=here("raising_reward")), sample)
    assert sample.reward == 4.0


def test_group_reward_sees_the_flattened_group_once():
    calls = calls_of(here("group_reward"))
    samples = [Sample(index=0), [Sample(index=1), Sample(index=2)]]
    asyncio.run(score_samples(make_args(custom_rm_path=here("group_reward"), group_rm=True), samples))
    assert calls == [[0, 1, 2]]
    assert [samples[0].reward, samples[1][0].reward, samples[1][1].reward] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("short_group_reward", "returned 1 rewards for 2 samples"),
        ("single_group_reward", "returned float for a group: return a list"),
        ("text_group_reward", "returned str for a group: return a list"),
        ("half_group_reward", "returned no score: reward is None"),
    ],
)
def test_group_reward_that_is_not_one_number_per_sample_stops_the_run(name, complaint):
    args = make_args(custom_rm_path=here(name), group_rm=True)
    with pytest.raises(PluginError, match=complaint) as caught:
        score(args, Sample(index=6), Sample(index=7))
    assert f"{__file__}:" in str(caught.value) and "sample " in str(caught.value)


def test_batched_rm_keeps_the_single_signature_without_group_rm():
    samples = [Sample(index=0, response="a"), Sample(index=1, response="bb")]
    assert asyncio.run(batched_async_rm(make_args(custom_rm_path=here("length_reward")), samples)) == [
        1.0,
        2.0,
    ]


# Failures
def test_a_mistake_in_a_reward_stops_the_run_at_the_first_with_file_line_and_sample():
    calls = calls_of(here("raising_reward"))
    sample = Sample(index=5, group_index=2, prompt="how many?", response="seven of them")
    with pytest.raises(PluginError) as caught:
        score(make_args(custom_rm_path=here("raising_reward"), reward_failure_action="drop"), sample)
    assert calls == [5]
    line = raising_reward.__code__.co_firstlineno + 2
    for part in (
        "--custom-rm-path",
        "KeyError: 'no such judge'",
        f"{__file__}:{line} in raising_reward",
        "sample 5 (group 2)",
    ):
        assert part in str(caught.value)
    assert "'how many?'" in str(caught.value) and "'seven of them'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        float("nan"),
        float("inf"),
        [1.0],
        {"acc": 1.0},
        {"score": None},
        {"score": "1"},
        object(),
        pytest.param(10**5000, id="an integer beyond any float"),
    ],
)
def test_a_reward_that_is_no_score_stops_the_run_at_the_first(value):
    calls = calls_of(here("given_reward"))
    args = make_args(custom_rm_path=here("given_reward"), reward_key="score", given=value)
    with pytest.raises(PluginError) as caught:
        score(args, Sample(index=5, prompt="how many?"))
    assert len(calls) == 1
    for part in (
        "returned no score",
        f"{__file__}:{given_reward.__code__.co_firstlineno}",
        "sample 5",
        "'how many?'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [Decimal("0.5"), Fraction(1, 2)])
def test_decimals_and_fractions_are_scores(value):
    sample = Sample(index=5)
    score(make_args(custom_rm_path=here("given_reward"), given=value), sample)
    assert sample.reward == 0.5 and type(sample.reward) is float


@pytest.mark.parametrize("kind", [ConnectionError, TimeoutError, OSError, HttpProblem])
def test_what_may_pass_is_tried_again_and_then_says_where_it_was_raised(kind):
    calls = calls_of(here("given_raise"))
    sample = Sample(index=5)
    score(make_args(custom_rm_path=here("given_raise"), given=kind("away")), sample)
    assert len(calls) == 3
    assert sample.reward_failure.kind == "infra_error"
    line = given_raise.__code__.co_firstlineno + 2
    assert f"{kind.__name__}: away at {__file__}:{line} in given_raise" in sample.reward_failure.reason


def test_an_answer_that_cannot_be_judged_is_not_judged_again():
    calls = calls_of(here("given_reward"))
    sample = Sample(index=5)
    score(make_args(custom_rm_path=here("given_reward"), given=invalid("no code in it")), sample)
    assert len(calls) == 1 and sample.reward_failure == invalid("no code in it")


def test_a_task_of_the_function_s_own_that_was_cancelled_is_a_failure_not_the_end():
    sample = Sample(index=5)
    score(make_args(custom_rm_path=here("cancelled_reward"), limits={"reward-retries": 0}), sample)
    assert sample.reward_failure.kind == "infra_error" and "cancelled" in sample.reward_failure.reason


@pytest.mark.parametrize(
    "name",
    [
        "exiting_reward",
        "exiting_plain_reward",
        "stop_iteration_plain_reward",
        "panicking_reward",
        "panicking_plain_reward",
        "interrupted_plain_reward",
    ],
)
def test_exits_and_stop_iteration_are_mistakes_too(name):
    with pytest.raises(PluginError, match=f"in {name}"):
        score(make_args(custom_rm_path=here(name), timeouts={"generate": 60.0}), Sample(index=5))


def test_an_interrupt_that_a_reward_raises_itself_does_not_end_the_event_loop():
    """The loop's thread would be gone, and whoever waits for it would wait for ever."""
    args = make_args(custom_rm_path=here("interrupted_reward"))
    with pytest.raises(PluginError, match="raised KeyboardInterrupt"):
        run(score_samples(args, [Sample(index=5)]), timeout_s=PATIENCE_S)
    assert run(asyncio.sleep(0, "alive"), timeout_s=PATIENCE_S) == "alive"


def test_a_built_in_reward_without_the_chosen_key_is_a_configuration_error():
    args = make_args(rm_type="dapo", reward_key="correct")
    with pytest.raises(RewardConfigError, match="no --reward-key 'correct'"):
        score(args, Sample(index=5, response="Answer: 1", label="1"))
    close_pools()


def test_reward_that_recovers_within_its_retries_is_a_score():
    sample = Sample(index=0)
    score(make_args(custom_rm_path=here("flaky_reward")), sample)
    assert sample.reward == 1.0 and sample.reward_failure is None


@pytest.mark.parametrize("name", ["hanging_reward", "hanging_plain_reward"])
def test_hanging_custom_reward_ends_at_its_deadline(name):
    sample = Sample(index=0)
    start = time.monotonic()
    score(
        make_args(custom_rm_path=here(name), timeouts={"generate": 0.2}, limits={"reward-retries": 0}), sample
    )
    assert time.monotonic() - start < LONG_S
    assert sample.reward_failure.kind == "infra_error"
    assert "--timeouts generate=0.2" in sample.reward_failure.reason


def test_time_out_raised_by_the_function_keeps_its_own_words():
    sample = Sample(index=0)
    score(make_args(custom_rm_path=here("own_timeout_reward"), limits={"reward-retries": 0}), sample)
    assert "upstream judge" in sample.reward_failure.reason


def test_built_in_check_that_hangs_is_invalid_and_is_not_tried_again(monkeypatch):
    monkeypatch.setitem(REWARDS, "endless", Reward(here("endless_reward"), "never ends", in_worker=False))
    for seconds in longer_each_time(0.5):  # the other one has no longer
        calls_of(here("endless_reward")).clear()
        args = make_args(rm_type="endless", timeouts={"reward": seconds})
        hung, fine = Sample(index=0), Sample(index=1, response="cat", label="cat", metadata={"rm_type": "f1"})
        score(args, hung, fine)
        close_pools()
        assert calls_of(here("endless_reward")) == [0]
        assert hung.reward is None and hung.reward_failure.reason.startswith("timeout")
        if fine.reward == 1.0:
            break
    assert fine.reward == 1.0


def test_configuration_error_stops_at_once():
    with pytest.raises(RewardConfigError, match="unknown --rm-type"):
        score(make_args(rm_type="maths"), Sample(index=0))


# Breaker
def test_breaker_names_kind_reason_count_sample_and_flag():
    args = make_args(
        custom_rm_path=here("unreachable_reward"), limits={"reward-retries": 0, "reward-failures": 3}
    )
    score(args, Sample(index=0), Sample(index=1))
    with pytest.raises(RewardFailuresExceeded) as caught:
        score(args, Sample(index=9, group_index=4))
    for part in (
        "3 sample(s)",
        "sample 9 (group 4)",
        "infra_error",
        "no such judge",
        "--limits reward-failures=3",
    ):
        assert part in str(caught.value)


def test_success_starts_the_breaker_count_anew():
    failing = make_args(
        custom_rm_path=here("unreachable_reward"), limits={"reward-retries": 0, "reward-failures": 2}
    )
    for _ in range(4):
        score(failing, Sample(index=0))
        score(make_args(custom_rm_path=here("length_reward")), Sample(index=1, response="a"))


def test_stop_action_ends_the_run_at_the_first_failure():
    args = make_args(
        custom_rm_path=here("unreachable_reward"), limits={"reward-retries": 0}, reward_failure_action="stop"
    )
    with pytest.raises(RewardFailuresExceeded, match="--reward-failure-action stop"):
        score(args, Sample(index=0))


async def renumbering_reward(args, samples):
    for sample in samples if isinstance(samples, list) else [samples]:
        sample.index = sample.group_index = 0
    return [1.0] * len(samples) if isinstance(samples, list) else 1.0


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_reward_may_not_give_samples_other_numbers(group_rm):
    samples = [Sample(index=6, group_index=3, response="4"), Sample(index=7, group_index=3, response="5")]
    run(score_samples(make_args(custom_rm_path=here("renumbering_reward"), group_rm=group_rm), samples))
    assert [(sample.index, sample.group_index, sample.reward) for sample in samples] == [
        (6, 3, 1.0),
        (7, 3, 1.0),
    ]


async def emptying_reward(args, sample):
    sample.response = None
    return 1.0


def test_a_reward_that_takes_the_answer_away_is_named():
    with pytest.raises(PluginError, match=r"emptying_reward.* whose response is None"):
        run(score_samples(make_args(custom_rm_path=here("emptying_reward")), [Sample(index=6, response="4")]))
