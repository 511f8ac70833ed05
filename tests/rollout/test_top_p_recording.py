"""What tokens were drawn from is asked for, recorded with them over every way
an answer can be cut, and survives files.
"""

import itertools

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine
from rollout_helpers import make_args, make_source

from slime.batch.convert import samples_to_batch
from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.rollout.prompt_groups import copy_sample, without_response
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.top_p import to_meta
from slime.utils.types import flatten_samples

TOP_P = ("--rollout-top-p", "0.9")


def asked(payload) -> bool:
    return payload["sampling_params"].get("custom_params") == {"return_top_p_token_ids": True}


def kept_of(token: int) -> list[int]:
    return sorted({token, token + 1, 3})


def tell(payload, number):
    """Two tokens at a time; every other answer ends early and is asked on for."""
    tokens = [20 + number % 7, 30 + number % 5]
    finish = "abort" if number % 2 == 0 else "stop"

    def meta_of(made):
        return to_meta([np.array(kept_of(token)) for token in made]) if asked(payload) else {}

    cut = {"break_after": 1} if number % 2 == 0 else {}
    return {"tokens": tokens, "finish": finish, "meta": meta_of(tokens), "meta_of": meta_of, **cut}


def assert_recorded(sample):
    ids, bounds = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert ids.dtype == bounds.dtype == torch.int32 and len(bounds) == sample.response_length + 1
    response = sample.tokens[-sample.response_length :]
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(bounds)] == [kept_of(t) for t in response]


def test_tokens_carry_what_they_were_drawn_from_over_several_answers(tmp_path):
    with FakeEngine(tell) as engine:
        args = make_args(tmp_path, engine, *TOP_P)
        samples = flatten_samples(generate_rollout(args, 0, make_source(args)).samples)
        assert all(asked(request) for request in engine.requests)
    assert max(sample.response_length for sample in samples) > 2
    for sample in samples:
        assert_recorded(sample)
    batch = samples_to_batch(args, samples)
    assert [len(x) for x in batch["rollout_top_p_token_offsets"]] == [s.response_length + 1 for s in samples]


@pytest.mark.parametrize("flags", [(), (*TOP_P, "--allow-sampling-mismatch")])
def test_nobody_asks_where_nothing_is_repeated(tmp_path, flags):
    with FakeEngine(tell) as engine:
        args = make_args(tmp_path, engine, *flags)
        samples = flatten_samples(generate_rollout(args, 0, make_source(args)).samples)
        assert not any("custom_params" in request["sampling_params"] for request in engine.requests)
    assert all(sample.rollout_top_p_token_ids is None for sample in samples)
    assert "rollout_top_p_token_ids" not in samples_to_batch(args, samples)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "does not report the ids that its tokens were drawn from"),
        (to_meta([np.array([5]), np.array([30])]), "token 20 at 0 is not among its top-p ids"),
        (to_meta([np.array([20, 400]), np.array([30])]), "top-p id 400 in a vocabulary of 128"),
    ],
)
def test_an_answer_that_does_not_tell_stops_the_run_by_name(tmp_path, meta, message):
    with FakeEngine(lambda payload, number: {"tokens": [20, 30], "meta": meta}) as engine:
        args = make_args(tmp_path, engine, *TOP_P)
        with pytest.raises(Exception, match=message):
            generate_rollout(args, 0, make_source(args))


def recorded_sample(tmp_path):
    source = make_source(make_args(tmp_path, None, *TOP_P))
    [group] = source.get_samples(1)
    for sample in group:
        sample.tokens = [1, 2]
        sample.append_response_tokens(
            tokens=[9, 8],
            log_probs=[0.0, 0.0],
            meta_info=to_meta([np.array(kept_of(9)), np.array(kept_of(8))]),
        )
        sample.reward = float(sample.index)
    return source, group


def test_dumps_and_the_buffer_keep_it(tmp_path):
    source, group = recorded_sample(tmp_path)
    save_rollout_dump(str(tmp_path / "d.pt"), 0, [group])
    for sample in load_rollout_dump(str(tmp_path / "d.pt"), 0):
        assert_recorded(sample)
    source.add_samples([group])
    torch.save(source.state_dict(), tmp_path / "state.pt")
    again = make_source(source.args)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for sample in flatten_samples(again.get_samples(1)):
        assert_recorded(sample)


def test_copies_are_independent_and_a_fresh_start_has_none(tmp_path):
    _, group = recorded_sample(tmp_path)
    copy = copy_sample(group[0])
    copy.append_response_tokens(tokens=[7], trainable=False)
    assert_recorded(group[0])
    assert len(copy.rollout_top_p_token_offsets) == 4
    assert without_response(group[0]).rollout_top_p_token_offsets is None


def test_a_sample_that_trains_without_it_is_refused_and_one_that_does_not_train_is_filled(tmp_path):
    source, group = recorded_sample(tmp_path)
    group[0].rollout_top_p_token_ids = group[0].rollout_top_p_token_offsets = None
    with pytest.raises(
        ValueError, match=r"sample 0 \(group 0\) does not carry .*--rollout-top-p 0.9.*custom_params"
    ):
        samples_to_batch(source.args, group)
    group[0].remove_sample = True
    batch = samples_to_batch(source.args, group)
    assert [x.tolist() for x in batch["rollout_top_p_token_offsets"]] == [[0, 0, 0], [0, 3, 6]]
    assert [len(x) for x in batch["rollout_top_p_token_ids"]] == [0, 6]


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([9, 8], [0, 1], "2 top-p offsets for 2 tokens"),
        ([9, 8], [0, 2, 1], "do not run from 0"),
        ([9, 7], [0, 1, 2], "token 8 at 1 is not among its top-p ids"),
    ],
)
def test_what_a_plug_in_wrote_is_checked(tmp_path, ids, offsets, message):
    source, group = recorded_sample(tmp_path)
    group[1].rollout_top_p_token_ids, group[1].rollout_top_p_token_offsets = ids, offsets
    with pytest.raises(ValueError, match=f"sample 1 .*{message}"):
        samples_to_batch(source.args, group)
