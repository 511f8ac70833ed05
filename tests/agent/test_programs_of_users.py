"""Programs that were written for slime play a rollout here as they are: what they ask, keep and score."""

from fake_engine import FakeEngine
from programs_of_users import SEEN
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.types import flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer
WROTE = [20, 21, 22, 23, EOS]


def answer(payload, number):
    return {"tokens": WROTE, "finish": "stop", "meta": {"finish_reason": {"type": "stop", "matched": EOS}}}


def play(tmp_path, function):
    with FakeEngine(answer) as engine:
        args = make_args(
            tmp_path, engine, "--rollout-batch-size", "2", "--rollout-max-response-len", "60",
            "--custom-generate-function-path", f"programs_of_users.{function}",
            "--custom-rm-path", "programs_of_users.reward_by_length", max_context_len=100,
        )  # fmt: skip
        source = make_source(args)
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
        assert_conserved(source)
        seen = GenerateState(args).tokenizer(SEEN, add_special_tokens=False)["input_ids"]
    return samples, engine, seen


def test_a_function_that_asks_by_itself_keeps_its_tokens_masks_and_reward(tmp_path):
    samples, engine, seen = play(tmp_path, "asks_by_itself")
    assert len(samples) == 4 and len(engine.requests) == 8
    for sample in samples:
        assert sample.tokens[-sample.response_length :] == [*WROTE, *seen, *WROTE]
        assert sample.loss_mask == [1] * 5 + [0] * len(seen) + [1] * 5
        assert sample.reward == sample.response_length == 10 + len(seen)
        assert sample.metadata["turns_taken"] == 2
    asked = {tuple(request["input_ids"]) for request in engine.requests}
    for sample in samples:
        assert tuple(sample.tokens[:-5]) in asked, "the second turn was asked behind what it stands behind"


def test_an_adapter_a_harness_and_a_box_of_ones_own_make_the_samples_of_an_episode(tmp_path):
    samples, engine, _ = play(tmp_path, "runs_a_harness")
    assert len(samples) == 4 and len(engine.requests) == 8
    for sample in samples:
        assert sum(sample.loss_mask) == 2 * len(WROTE) and sample.reward == 1.0
        assert sample.metadata["exit_code"] == 0 and len(sample.metadata["turns"]) == 2
        assert sample.response and sample.rollout_id is not None
