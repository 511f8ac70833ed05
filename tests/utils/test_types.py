"""`Sample` keeps tokens, masks, log-probs and versions aligned."""

import dataclasses

import numpy as np
import pytest
import torch

from slime.utils.top_p import to_meta
from slime.utils.types import RewardFailure, Sample, SpecInfo, flatten_samples, is_score
from slime.wire.protocol import Generation


def answer(finish="stop", version="r:1", **extra):
    return {
        "finish_reason": {"type": finish},
        "weight_version": version,
        "prompt_tokens": 2,
        "cached_tokens": 1,
        **extra,
    }


def test_policy_and_tool_tokens_stay_aligned():
    sample = Sample(index=0, tokens=[5, 6])
    sample.append_response_tokens(tokens=[7], log_probs=[-0.1], meta_info=answer())
    sample.append_response_tokens(tokens=[8, 8], trainable=False)
    sample.append_response_tokens(tokens=[2], log_probs=[-0.2], meta_info=answer(version="r:2"))
    assert sample.tokens == [5, 6, 7, 8, 8, 2]
    assert sample.loss_mask == [1, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.1, 0.0, 0.0, -0.2]
    assert sample.version_spans == [("r:1", 0, 1), ("r:2", 3, 4)]
    assert sample.weight_versions == ["r:1", "r:2"]
    assert sample.effective_response_length == 2


@pytest.mark.parametrize(
    "finish, status",
    [("stop", "COMPLETED"), ("length", "TRUNCATED"), ("abort", "ABORTED"), (None, "PENDING")],
)
def test_finish_reason_sets_the_status(finish, status):
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=answer(finish))
    assert sample.status is Sample.Status[status]


def test_spans_of_the_engine_are_shifted_to_the_response():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[1, 1], log_probs=[0, 0], meta_info=answer())
    spans = [{"version": "r:1", "start": 0, "end": 1}, {"version": "r:2", "start": 1, "end": 3}]
    sample.append_response_tokens(
        tokens=[1, 1, 1], log_probs=[0, 0, 0], meta_info=answer(weight_versions=spans)
    )
    assert sample.version_spans == [("r:1", 0, 2), ("r:1", 2, 3), ("r:2", 3, 5)]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"tokens": [1, 2], "log_probs": [0.0]}, "1 log-probs for 2"),
        ({"tokens": [1]}, "without log-probs"),
        ({"tokens": [1], "log_probs": [0.0], "trainable": False}, "not trained"),
    ],
)
def test_misaligned_tokens_are_refused(kwargs, message):
    sample = Sample(index=3, group_index=1)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**kwargs)
    assert sample.tokens == [] and sample.response_length == 0


def test_trainable_tokens_cannot_follow_tokens_without_log_probs():
    sample = Sample(tokens=[1, 2], response_length=2)
    with pytest.raises(ValueError, match="cannot follow"):
        sample.append_response_tokens(tokens=[3], log_probs=[0.0])


def test_top_p_spans_are_merged():
    sample = Sample()
    sample.append_response_tokens(
        tokens=[1, 2],
        log_probs=[0, 0],
        meta_info={"top_p_token_ids": [1, 9, 2], "top_p_token_offsets": [0, 2, 3]},
    )
    sample.append_response_tokens(tokens=[7], trainable=False)
    sample.append_response_tokens(
        tokens=[3], log_probs=[0], meta_info={"top_p_token_ids": [3], "top_p_token_offsets": [0, 1]}
    )
    assert sample.rollout_top_p_token_ids.tolist() == [1, 9, 2, 3]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3, 4]
    assert sample.rollout_top_p_token_ids.dtype == torch.int32  # a list of numbers takes nine times as much


def test_sglangs_report_of_the_kept_ids_becomes_ours():
    meta = {
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 9, "x"]],  # over the whole vocabulary
        "output_token_sampling_mask": [[7, 3], [9]],
        "output_token_sampling_logprobs": [-0.4, 0.0],
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_version": "run:1",
    }
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[7, 9], log_probs=[-1.0, -2.0], meta_info=meta)
    assert sample.rollout_log_probs == [-0.4, 0.0]
    assert sample.rollout_top_p_token_ids.tolist() == [7, 3, 9]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    made = Generation.from_json({"output_ids": [7, 9], "meta_info": meta})
    assert made.log_probs == (-0.4, 0.0) and "output_token_sampling_mask" not in made.meta
    assert made.meta["output_token_logprobs"] == [[-0.4, 7, None], [0.0, 9, "x"]]


def test_top_p_spans_begin_behind_tokens_that_have_none():
    sample = Sample(tokens=[5])
    sample.append_response_tokens(tokens=[7, 8], trainable=False)
    sample.append_response_tokens(tokens=[3], log_probs=[0], meta_info=to_meta([np.array([2, 3])]))
    sample.append_response_tokens(tokens=[4], trainable=False, meta_info=to_meta([np.array([4])]))
    sample.append_response_tokens(log_probs=[], tokens=[], meta_info=to_meta([]))  # aborted before it began
    assert sample.rollout_top_p_token_ids.tolist() == [2, 3, 4]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 0, 0, 2, 3]


def test_lists_that_a_plug_in_put_in_are_continued():
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[0.0])
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [2, 6], [0, 2]
    sample.append_response_tokens(tokens=[3], log_probs=[0], meta_info=to_meta([np.array([3])]))
    assert sample.rollout_top_p_token_ids.tolist() == [2, 6, 3]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "meta, message",
    [
        ({"top_p_token_ids": [3]}, "belong together"),
        (
            {"top_p_token_ids": [3, 4], "top_p_token_offsets": [0, 1]},
            "do not run from 0 to the number of ids, 2",
        ),
        ({"top_p_token_ids": [3], "top_p_token_offsets": [0, 1, 1]}, "3 top-p offsets for 1 tokens"),
        ({"top_p_token_ids": [4], "top_p_token_offsets": [0, 1]}, "token 3 at 0 is not among its top-p ids"),
        ({"top_p_token_ids": [-3, 3], "top_p_token_offsets": [0, 2]}, "top-p id -3"),
        ({"top_p_token_ids": "AAA", "top_p_token_offsets": "AAAAAAEAAAA="}, "padding"),
        ({}, "2 top-p offsets for 2 response tokens.*return_top_p_token_ids"),
    ],
)
def test_top_p_spans_that_do_not_fit_their_tokens_are_refused(meta, message):
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[0], meta_info=to_meta([np.array([1])]))
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(tokens=[3], log_probs=[0], meta_info=meta)


def test_samples_survive_a_round_trip_with_foreign_attributes():
    sample = Sample(index=1, reward_failure=RewardFailure("invalid", "no box"))
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=answer())
    sample.source = "mine"
    back = Sample.from_dict(sample.to_dict())
    assert dataclasses.asdict(back) == dataclasses.asdict(sample)
    assert back.source == "mine"


@pytest.mark.parametrize(
    "accepted, drafted",
    [
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_token_num", "spec_draft_token_num"),
    ],
)
def test_speculation_is_counted_under_the_names_of_either_engine_generation(accepted, drafted):
    info = SpecInfo()
    for _ in range(2):
        info.add({accepted: 6, drafted: 12, "spec_verify_ct": 4, "completion_tokens": 10})
    assert vars(info) == dict(
        spec_accept_token_num=12, spec_draft_token_num=24, spec_verify_ct=8, completion_token_num=20
    )


def test_nested_groups_flatten_in_order():
    a, b, c = Sample(index=0), Sample(index=1), Sample(index=2)
    assert [s.index for s in flatten_samples([[a, [b]], c])] == [0, 1, 2]


@pytest.mark.parametrize(
    "value, expected", [(1, True), (0.5, True), (True, True), (float("nan"), False), ("1", False)]
)
def test_only_finite_numbers_are_scores(value, expected):
    assert is_score(value) is expected


def test_the_package_offers_the_sample():
    import slime

    assert slime.Sample is Sample
    with pytest.raises(AttributeError, match="no attribute 'Simple'"):
        _ = slime.Simple
