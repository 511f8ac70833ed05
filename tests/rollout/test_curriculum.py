"""--curriculum: each epoch in the stated order, every prompt once, the same after a resume; priorities."""

import json

import pytest
from rollout_helpers import make_args, make_source

from slime.rollout.data_source import RolloutDataSource
from slime.rollout.filter_hub.buffer_filters import pop_by_priority
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample


def prompts_of(groups):
    return [group[0].prompt for group in groups]


def finish(source, groups, rates):
    """Train on the groups; the responses to prompt qN have the mean reward rates[N]."""
    for group in groups:
        for sample in group:
            sample.reward = rates[int(sample.prompt[1:])]
    source.settle(groups[:2], "filtered", "zero_std")
    source.settle(groups[2:], "trained")


RATES = [1.0, 0.6, 0.0, 0.45, 0.9]


@pytest.mark.parametrize("source_class", [RolloutDataSource, make_source])
def test_the_next_epoch_begins_with_what_is_solved_now_and_then(tmp_path, source_class):
    source = source_class(make_args(tmp_path, None, "--curriculum", "pass_rate", prompts=5))
    first = source.get_samples(5)
    assert prompts_of(first) == [f"q{i}" for i in range(5)]
    finish(source, first, RATES)
    assert prompts_of(source.get_samples(5)) == ["q3", "q1", "q4", "q0", "q2"]


def test_equal_prompts_keep_the_shuffled_order(tmp_path):
    plain = make_source(make_args(tmp_path, None, "--rollout-shuffle", prompts=5))
    source = make_source(make_args(tmp_path, None, "--rollout-shuffle", "--curriculum", "pass_rate"))
    for _ in range(2):
        groups = source.get_samples(5)
        assert prompts_of(groups) == prompts_of(plain.get_samples(5))
        finish(source, groups, [0.5] * 5)


def test_a_resumed_run_hands_out_what_the_first_would_have(tmp_path):
    args = make_args(tmp_path, None, "--rollout-shuffle", "--curriculum", "pass_rate", prompts=5)
    source = make_source(args)
    finish(source, source.get_samples(5), RATES)
    started = source.get_samples(2)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make_source(args)
    resumed.load_state_dict(state)
    for one in (source, resumed):  # rates that arrive after the checkpoint change the next epoch alone
        finish(one, started, [0.5] * 5)
    expected = prompts_of(source.get_samples(8))
    assert prompts_of(resumed.get_samples(8)) == expected
    assert sorted(prompts_of(started) + expected[:3]) == [f"q{i}" for i in range(5)]


def test_a_run_that_had_no_curriculum_gets_one(tmp_path):
    plain = make_source(make_args(tmp_path, prompts=5))
    plain.get_samples(2)
    source = make_source(make_args(tmp_path, None, "--curriculum", "pass_rate"))
    source.load_state_dict(plain.state_dict())
    assert prompts_of(source.get_samples(3)) == ["q2", "q3", "q4"]


def test_difficulty_is_a_column_of_the_metadata(tmp_path):
    rows = [
        {"input": f"q{i}", "label": "1", "metadata": {"difficulty": d}} for i, d in enumerate([3, 1, 2.5])
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = make_args(tmp_path, None, "--curriculum", "difficulty")
    assert prompts_of(make_source(args).get_samples(6)) == ["q1", "q2", "q0"] * 2
    (tmp_path / "prompts.jsonl").write_text(json.dumps(rows[0] | {"metadata": {}}) + "\n")
    with pytest.raises(PluginError, match=r"prompt 0 of epoch 0 has metadata.* = None, not a number"):
        make_source(args)


def test_a_function_of_the_user_visits_every_prompt_once(tmp_path):
    (tmp_path / "own.py").write_text(
        "def backwards(args, epoch, samples, pass_rates):\n    return range(len(samples) - 1, -1, -1)\n"
        "def some(args, epoch, samples, pass_rates):\n    return [0, 0, 1]\n"
    )
    args = make_args(tmp_path, None, "--curriculum", f"{tmp_path}/own.py:backwards", prompts=3)
    assert prompts_of(make_source(args).get_samples(3)) == ["q2", "q1", "q0"]
    args = make_args(tmp_path, None, "--curriculum", f"{tmp_path}/own.py:some")
    with pytest.raises(PluginError, match="returned 3 places; return each of 0 to 2 once"):
        make_source(args)


def test_the_buffer_gives_out_the_highest_priority_first():
    priorities = [0, 2, None, 2, 1]
    buffer = [
        [Sample(index=i, metadata={} if p is None else {"priority": p})] for i, p in enumerate(priorities)
    ]
    assert [group[0].index for group in pop_by_priority(None, 0, buffer, 3)] == [1, 3, 4]
    assert [group[0].index for group in buffer] == [0, 2]
    assert [group[0].index for group in pop_by_priority(None, 0, buffer, 5)] == [0, 2] and not buffer
