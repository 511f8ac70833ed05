"""Supervised rollouts: masks cover the assistant's words, and nothing unusable slips in."""

import json

import pytest
from rollout_helpers import assert_conserved, make_args, make_source
from tiny_model import make_tiny_tokenizer

from slime.rollout.sft_rollout import generate_rollout

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
SFT = ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1")
ROLLOUT = ("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout")


def sft_args(folder, conversations, *flags):
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk, "label": ""}) + "\n" for talk in conversations))
    flags = ("--input-key", "messages", "--rollout-batch-size", "2", *SFT, *ROLLOUT, *flags)
    return make_args(folder, None, "--prompt-data", str(path), *flags)


def test_a_batch_holds_tokens_and_masks_of_the_responses(tmp_path):
    args = sft_args(tmp_path, [TALK, TALK[:2]])
    source = make_source(args)
    output = generate_rollout(args, 0, source)
    tokenizer = make_tiny_tokenizer()
    [long], [short] = output.samples
    trained = [t for t, m in zip(long.tokens[-long.response_length :], long.loss_mask, strict=True) if m]
    assert tokenizer.decode(trained) == "4<|im_end|>\nyes<|im_end|>\n"
    assert long.loss_mask[0] == 1 and len(long.loss_mask) == long.response_length
    assert (
        tokenizer.decode(short.tokens)
        == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert short.response_length == 3 and short.reward is None
    assert_conserved(source)


def test_a_conversation_without_assistant_is_left_out_with_its_reason(tmp_path):
    args = sft_args(tmp_path, [TALK[:1], TALK, TALK[:2]])
    source = make_source(args)
    output = generate_rollout(args, 0, source)
    assert [group[0].index for group in output.samples] == [1, 2]
    assert output.metrics == {"rollout/sft/skipped_no_assistant_token": 1}
    assert_conserved(source)


def test_a_dataset_without_any_assistant_is_an_error(tmp_path):
    args = sft_args(tmp_path, [TALK[:1], TALK[:1], TALK[:1]])
    with pytest.raises(
        ValueError, match=r"none of 3 conversations can be trained on \(no assistant token: 3\)"
    ):
        generate_rollout(args, 0, make_source(args))


def test_a_conversation_beyond_the_context_is_left_out_without_engines(tmp_path):
    args = sft_args(tmp_path, [TALK, TALK[:2], TALK[:2]])
    args.max_context_len, args.rollout_max_context_len = None, 40
    output = generate_rollout(args, 0, make_source(args))
    assert [group[0].index for group in output.samples] == [1, 2]
    assert output.metrics == {"rollout/sft/skipped_longer_than_context": 1}


def test_text_instead_of_messages_names_the_fix(tmp_path):
    args = make_args(tmp_path, None, *SFT)
    args.label_key = None
    with pytest.raises(ValueError, match=r"sample 0 .*list of messages.*--input-key"):
        generate_rollout(args, 0, make_source(args))


def test_one_answer_per_conversation(tmp_path):
    args = make_args(tmp_path, None)
    with pytest.raises(ValueError, match="--n-samples-per-prompt is 2"):
        generate_rollout(args, 0, make_source(args))


def test_a_prompt_and_its_completion_make_a_conversation(tmp_path):
    rows = [("2+2?", "4"), (TALK[:1], TALK[1:2]), (TALK[:2], "unread")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    keys = ("--prompt-data", str(path), "--input-key", "prompt", "--label-key", "completion")
    args = make_args(tmp_path, None, *keys, *SFT, *ROLLOUT, "--rollout-batch-size", "3")
    tokens = [sample.tokens for [sample] in generate_rollout(args, 0, make_source(args)).samples]
    assert tokens[0] == tokens[1] == tokens[2]
