"""Each advisory is provoked by the metrics that it is about, is told once, and a healthy run gets none."""

import pytest

from slime.observability.advisories import CHECKS, Advisor, Facts

FACTS = Facts(8, 100, True, False, True)


def advise(rows, facts=FACTS):
    advisor = Advisor(facts)
    return [advice for step, row in enumerate(rows) for advice in advisor.observe(row, step)]


HEALTHY = {
    "rollout/raw_reward": 0.4,
    "rollout/groups/kept": 32,
    "rollout/zero_std/count_0.0": 5,
    "rollout/truncated_ratio": 0.1,
    "rollout/response_len/mean": 30.0,
    "train/grad_norm": 1.0,
    "train/entropy_loss": 1.2,
    "train/kl_loss": 0.01,
    "eval/held": 0.5,
    "eval/held-truncated_ratio": 0.0,
    "perf/rollout_time": 10.0,
    "perf/non_generation_time/mean": 0.5,
    "perf/train_wait_time": 4.0,
    "perf/step_time": 10.0,
}


def steps(count=8, **changes):
    """Rows of a run whose named metrics take the given values one after another; the last one stays."""
    return [
        HEALTHY | {name: values[min(i, len(values) - 1)] for name, values in changes.items()}
        for i in range(count)
    ]


CASES = {
    "reward_never_moves": (
        {"rollout/raw_reward": [0.0], "rollout/zero_std/count_0.0": [32]},
        "got the reward 0",
    ),
    "groups_without_difference": ({"rollout/zero_std/count_1.0": [25]}, "in 94% of the groups"),
    "special_ending": (
        {"rollout/raw_reward": [0.0], "rollout/special_ending_ratio": [0.9]},
        "90% of the responses end in a special token",
    ),
    "truncated_responses": (
        {"rollout/truncated_ratio": [0.75]},
        "75% of the responses .* --rollout-max-response-len 100",
    ),
    "entropy_collapse": ({"train/entropy_loss": [1.2, 1.1, 1.0, 0.01]}, "fell from 1.1 to 0.01"),
    "kl_runaway": ({"train/kl_loss": [0.1, 2.0]}, "above 1 nat"),
    "evaluation_falls": ({"eval/held": [0.2, 0.6, 0.5, 0.3]}, r"fell from 0.6 \(step 1\) to 0.3"),
    "trainer_waits": ({"perf/train_wait_time": [9.5]}, "waited for responses in 95%"),
}


def test_a_healthy_run_gets_no_advice():
    assert advise(steps(50)) == []


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_told_once_with_its_evidence_and_a_flag(cause):
    changes, evidence = CASES[cause]
    told = [advice for advice in advise(steps(20, **changes)) if advice.cause == cause]
    assert len(told) == 1
    assert __import__("re").search(evidence, told[0].evidence)
    assert str(told[0]).endswith(".") and len(told[0].advice) > 20


def test_every_check_is_provoked_here():
    assert set(CASES) == set(CHECKS)


def test_one_odd_batch_is_no_pattern():
    rows = steps(4)
    rows[1] |= {"rollout/truncated_ratio": 1.0, "train/grad_norm": 0.0, "rollout/zero_std/count_0.0": 32}
    assert advise(rows) == []


def test_settings_alone():
    assert Advisor(FACTS).at_start() == []
    lost = Facts(8, 100, False, False, True)
    assert [advice.cause for advice in Advisor(lost).at_start()] == ["no_save"]


def test_a_run_with_a_teacher_needs_no_rewards():
    silent = {
        "rollout/raw_reward": 0.0,
        "rollout/zero_std/count_0.0": 32,
        "rollout/special_ending_ratio": 1.0,
    }
    rows = [HEALTHY | silent] * 5
    assert len(advise(rows)) >= 2
    assert advise(rows, Facts(8, 100, True, False, True, has_teacher=True)) == []


def test_a_supervised_run_waits_for_no_answers():
    rows = [HEALTHY | {"perf/train_wait_time": 9.5}] * 5
    assert advise(rows) and advise(rows, Facts(1, 100, True, False, False)) == []


@pytest.mark.parametrize(
    "row", [{}, {"rollout/raw_reward": None}, {"rollout/raw_reward": float("nan")}, {"x": True}]
)
def test_missing_and_odd_values_are_no_reason_to_fail(row):
    assert advise([row] * 10) == []
