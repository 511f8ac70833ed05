"""Samples become train data: rewards by real groups, masks, fan-out,
hooks, and one clear error for each bad field.
"""

import sys

import numpy as np
import pytest
import torch
from trainer_helpers import random_samples, trainer_args

from slime.batch import convert
from slime.batch.convert import samples_to_batch
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample, invalid


def args(**changes):
    return trainer_args("unused", **changes)


def sample(reward, *, group=0, rollout=None, response=2, **fields):
    return Sample(
        group_index=group,
        rollout_id=rollout,
        index=fields.pop("index", 0),
        tokens=list(range(3 + response)),
        response_length=response,
        reward=reward,
        **fields,
    )


def test_a_batch_has_tensors_of_the_documented_types():
    batch = samples_to_batch(args(), random_samples(2, 2))
    assert batch["tokens"][0].dtype == torch.int64
    assert batch["rollout_log_probs"][0].dtype == torch.float32
    for i in range(4):
        length = batch["response_lengths"][i]
        assert len(batch["loss_masks"][i]) == len(batch["rollout_log_probs"][i]) == length
        assert batch["rollout_mask_sums"][i] == batch["loss_masks"][i].sum()


def test_nested_fan_out_lists_are_flattened_and_siblings_share_denominator_and_statistics():
    groups = [[[sample(1.0, rollout=5), sample(1.0, rollout=5, response=3)], sample(0.0, rollout=6)]]
    batch = samples_to_batch(args(grpo_std_normalization=False), groups)
    assert batch["rewards"] == [0.5, 0.5, -0.5]
    assert batch["rollout_mask_sums"] == [5, 5, 2]


def test_samples_without_a_rollout_id_stand_alone():
    batch = samples_to_batch(args(), [sample(1.0, rollout=3), sample(0.0), sample(0.5)])
    assert len(set(batch["rollout_ids"])) == 3


def test_a_removed_sample_trains_nothing_but_stays_in_the_group_mean():
    batch = samples_to_batch(
        args(grpo_std_normalization=False), [sample(1.0, remove_sample=True), sample(0.0)]
    )
    assert batch["loss_masks"][0].tolist() == [0, 0]
    assert batch["rewards"] == [0.5, -0.5]


def test_versions_follow_the_spans():
    spans = [("run:3", 0, 1), ("run:12", 2, 3)]
    batch = samples_to_batch(args(), [sample(1.0, response=3, version_spans=spans)])
    assert batch["versions"][0].tolist() == [3, -1, 12]


def test_rewards_pass_through_for_sft_and_without_normalisation():
    samples = [sample(1.0), sample(0.0)]
    assert samples_to_batch(args(loss_type="sft_loss"), samples)["rewards"] == [1.0, 0.0]
    assert samples_to_batch(args(rewards_normalization=False), samples)["rewards"] == [1.0, 0.0]


def test_supervised_samples_need_no_reward():
    assert samples_to_batch(args(loss_type="sft_loss"), [sample(None)])["rewards"] == [0.0]


def test_the_reward_key_chooses_and_a_missing_one_is_named():
    assert samples_to_batch(args(reward_key="acc"), [sample({"acc": 1.0})])["raw_reward"] == [1.0]
    with pytest.raises(ValueError, match="--reward-key nope: the reward of sample 0 has only acc"):
        samples_to_batch(args(reward_key="nope"), [sample({"acc": 1.0})])
    with pytest.raises(ValueError, match=r"reward of sample 0 .* None"):
        samples_to_batch(args(reward_key="acc"), [sample(None)])


def test_metadata_and_shown_rewards_travel():
    samples = [sample(1.0, train_metadata={"a": 1}, metadata={"raw_reward": 7.0}), sample(0.0)]
    batch = samples_to_batch(args(), samples)
    assert batch["metadata"] == [{"a": 1}, None]
    assert batch["raw_reward"] == [7.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: [sample(float("nan"), index=7)], "reward of sample 7 .* nan"),
        (lambda: [sample(None, reward_failure=invalid("no answer"))], "invalid: no answer"),
        (lambda: [sample({"acc": 1.0})], "--reward-key"),
        (lambda: [sample(1.0, loss_mask=[1, 1, 1])], "loss_masks has 3 entries for 2 response tokens"),
        (lambda: [sample(1.0, loss_mask=[1, 2])], "loss_mask contains 2:"),
        (lambda: [sample(1.0, loss_mask=[0.5, 1])], "loss_mask contains 0.5"),
        (lambda: [sample(1.0, rollout_log_probs=[0.0])], "rollout_log_probs has 1 entries for 2"),
        (
            lambda: [sample(1.0, rollout_log_probs=[0.0, 0.0]), sample(0.0)],
            "1 of 2 samples have no rollout_log_probs",
        ),
        (lambda: [sample(1.0, rollout_log_probs=[0.0, float("inf")])], "NaN or inf"),
        (
            lambda: [Sample(tokens=[1, 2], response_length=2, reward=1.0, group_index=0)],
            "at least one prompt token",
        ),
        (
            lambda: [Sample(index=3, group_index=0, reward=1.0)],
            "sample 3 of the rollout has response length 0 but 0 tokens",
        ),
        (lambda: [sample(1.0, group=None)], "no group_index"),
        (lambda: [], "no samples"),
    ],
)
def test_bad_samples_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        samples_to_batch(args(), bad())


def test_custom_reward_post_process_replaces_normalisation(tmp_path, monkeypatch):
    (tmp_path / "h3_hooks.py").write_text(
        "def post(args, samples):\n    return [0] * len(samples), [9.0] * len(samples)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    batch = samples_to_batch(
        args(custom_reward_post_process_path="h3_hooks.post"), [sample(1.0), sample(0.0)]
    )
    assert batch["raw_reward"] == [0, 0]
    assert batch["rewards"] == [9.0, 9.0]
    sys.modules.pop("h3_hooks")


def test_custom_conversion_replaces_everything_and_is_checked(tmp_path):
    file = tmp_path / "convert.py"
    file.write_text(
        "def good(args, samples):\n"
        "    return {'tokens': [[1, 2, 3]], 'response_lengths': [2], 'rewards': [1.0], 'mine': ['kept']}\n"
        "def bad(args, samples):\n"
        "    return {'tokens': [[1, 2, 3]], 'response_lengths': [2], 'rewards': [1.0], 'loss_masks': [[1]]}\n"
    )
    batch = samples_to_batch(args(custom_convert_samples_to_train_data_path=f"{file}:good"), [sample(1.0)])
    assert batch["mine"] == ["kept"]
    assert batch["rollout_mask_sums"] == [2]
    with pytest.raises(ValueError, match=r"loss_masks has 1 entries for 2 response tokens.*custom-convert"):
        samples_to_batch(args(custom_convert_samples_to_train_data_path=f"{file}:bad"), [sample(1.0)])


def test_long_responses_lose_reward_before_the_comparison():
    long, short = sample(1.0, response=10), sample(1.0, response=2, index=1)
    shaped = args(overlong_buffer_len=4, rollout_max_response_len=10)
    batch = samples_to_batch(shaped, [long, short])
    assert batch["raw_reward"] == [1.0, 1.0]
    assert batch["rewards"][0] < 0 < batch["rewards"][1]
    plain = samples_to_batch(shaped.replace(rewards_normalization=False), [long, short])
    assert plain["rewards"] == [0.0, 1.0]


def test_the_estimator_chooses_what_rewards_are_compared_with():
    samples = [sample(1.0), sample(0.0, response=6, index=1), sample(0.5, index=2)]
    rewards = {
        name: samples_to_batch(args(advantage_estimator=name), samples)["rewards"]
        for name in ("dr_grpo", "rloo", "opo", "maxrl", "reinforce_plus_plus")
    }
    assert rewards["dr_grpo"] == pytest.approx([0.5, -0.5, 0.0])
    assert rewards["rloo"] == pytest.approx([0.75, -0.75, 0.0])
    assert rewards["opo"] == pytest.approx([0.7, -0.3, 0.2])  # (2 x 1 + 6 x 0 + 2 x 0.5) / 10 = 0.3
    assert rewards["maxrl"] == pytest.approx([1.0, -1.0, 0.0])
    assert rewards["reinforce_plus_plus"] == [1.0, 0.0, 0.5]


def test_remax_compares_with_the_greedy_answer_of_the_metadata():
    samples = [
        sample(1.0, metadata={"greedy_reward": 0.25}),
        sample(0.0, metadata={"greedy_reward": 0.25}, index=1),
    ]
    assert samples_to_batch(args(advantage_estimator="remax"), samples)["rewards"] == [0.75, -0.25]
    with pytest.raises(ValueError, match="greedy_reward"):
        samples_to_batch(args(advantage_estimator="remax"), [sample(1.0)])


def test_tokens_that_name_no_version_have_the_one_the_engines_held():
    spans = [("run:3", 0, 1)]
    made = [
        sample(1.0, response=3, version_spans=spans, loss_mask=[1, 0, 1]),
        sample(0.0, response=3, weight_versions=["run:5", "run:4"]),
        sample(0.0, response=2),
        sample(0.0, response=2, version_spans=[("default", 0, 2)]),
    ]
    batch = samples_to_batch(args(), made, engine_version="run:7")
    assert [versions.tolist() for versions in batch["versions"]] == [[3, -1, 7], [4, 4, 4], [7, 7], [7, 7]]
    assert "versions" not in samples_to_batch(args(), made[2:])


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("return samples[0].metadata['gold'], []", r"raised KeyError: 'gold'\n  at .*hook.py:2 in post"),
        ("return [1.0] * len(samples)", r"returned list; return \(raw_rewards, rewards\)"),
        ("return None", "returned NoneType"),
        ("return [1.0], [1.0]", "returned 1 raw rewards and 1 rewards; return one of each"),
        ("return [1.0] * len(samples), [None] * len(samples)", "raised TypeError"),
    ],
)
def test_a_mistake_in_the_reward_post_process_is_named_with_its_place(tmp_path, body, complaint):
    file = tmp_path / "hook.py"
    file.write_text(f"def post(args, samples):\n    {body}\n")
    three = [sample(1.0), sample(0.0, index=1), sample(0.0, index=2)]
    with pytest.raises(PluginError, match=complaint) as caught:
        samples_to_batch(args(custom_reward_post_process_path=f"{file}:post"), three)
    assert str(file) in str(caught.value)


def test_a_mistake_in_the_custom_conversion_is_named_with_its_place(tmp_path):
    file = tmp_path / "convert.py"
    file.write_text("def make(args, samples):\n    return {'tokens': samples[9]}\n")
    with pytest.raises(
        PluginError, match=r"IndexError: list index out of range\n  at .*convert.py:2 in make"
    ):
        samples_to_batch(args(custom_convert_samples_to_train_data_path=f"{file}:make"), [sample(1.0)])


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_columns_that_are_cut_from_one_tensor_equal_those_made_one_by_one(kind):
    rows = [kind(row) for row in ([0.25, -1.5, 3.0], [], [7.0])]
    made = convert._rows(rows, torch.float32)
    assert [row.tolist() for row in made] == [[0.25, -1.5, 3.0], [], [7.0]]
    assert all(row.dtype is torch.float32 and row.dim() == 1 for row in made)
