"""Counters that are zero are logged, so that no curve is drawn across the steps between two counts."""

import json

from slime.arguments import default_args
from slime.observability.counters import Counters, is_counter


def test_a_counter_that_was_reported_once_is_zero_in_every_later_row_of_its_kind():
    counters = Counters()
    first = {"rollout/raw_reward": 0.5, "rollout/reward_failure/timeout": 3, "rollout/zero_std/count_1.0": 2}
    always = {"rollout/answers_not_compared": 0, "rollout/groups/of_one": 0}
    assert counters.fill(first, "rollout") == first | always
    second = counters.fill({"rollout/raw_reward": 0.5}, "rollout")
    zeros = {"rollout/reward_failure/timeout": 0, "rollout/zero_std/count_1.0": 0}
    assert second == {"rollout/raw_reward": 0.5} | zeros | always
    assert counters.fill({"train/loss": 0.1}, "train") == {
        "train/loss": 0.1,
        "train/empty_steps": 0,
        "train/nonfinite_steps": 0,
    }


def test_evaluations_and_resumed_runs_have_their_zeros_too():
    counters = Counters(
        ["eval/held/reward_failure/timeout", "eval/held", "train/loss", "rollout/staleness/lag_1"]
    )
    assert counters.fill({"eval/held": 1.0}, "eval") == {
        "eval/held": 1.0,
        "eval/held/reward_failure/timeout": 0,
    }
    assert counters.fill({"rollout/staleness/lag_0": 1.0}, "rollout")["rollout/staleness/lag_1"] == 0


def test_what_a_user_reports_by_a_function_of_his_own_gets_nothing_added():
    assert Counters(["rollout/groups/failed"]).fill({}, "rollout") == {}


def test_means_and_names_that_nobody_knows_are_no_counters():
    for name in ("rollout/raw_reward", "rollout/staleness/mean", "rollout/response_len/max", "mine/count"):
        assert not is_counter(name), name


def test_rollouts_that_are_done_again_are_not_those_of_an_earlier_start(tmp_path):
    """A killed run logs the same rows as one that nobody killed."""
    rows = [
        {"rollout/step": 0, "rollout/staleness/lag_0": 4},
        {"train/step": 1, "train/staleness/lag_0": 4},
        {"rollout/step": 1, "rollout/staleness/lag_1": 4},
        {"train/step": 2, "train/staleness/lag_1": 4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counters = Counters.of_run(tmp_path, 1, default_args(num_steps_per_rollout=2))
    found = [counters.fill({f"{kind}/x": 1}, kind) for kind in ("rollout", "train")]
    assert [[name for name in row if "staleness" in name] for row in found] == [
        ["rollout/staleness/lag_0"],
        ["train/staleness/lag_0"],
    ]
