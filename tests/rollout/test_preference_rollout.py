"""Preference pairs from conversations: what is shared is prompt, what
differs is compared, nothing unusable slips in.
"""

import json

import pytest
from rollout_helpers import assert_conserved, make_args, make_source
from tiny_model import make_tiny_tokenizer

from slime.rollout.preference_rollout import generate_rollout

ASK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "so?"},
]


def answered(text):
    return [*ASK, {"role": "assistant", "content": text}]


def pair_args(folder, rows, *flags):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("--input-key", "chosen", "--label-key", "rejected", "--loss-type", "dpo_loss")
    rollout = ("--rollout-function-path", "slime.rollout.preference_rollout.generate_rollout")
    flags = (*keys, *rollout, "--rollout-batch-size", "2", "--n-samples-per-prompt", "1", *flags)
    return make_args(folder, None, "--prompt-data", str(path), *flags)


def test_a_row_becomes_two_answers_of_one_rollout(tmp_path):
    rows = [
        {"chosen": answered("4"), "rejected": answered("five"), "metadata": {"margin": 0.5}},
        {"chosen": answered("a"), "rejected": answered("b")},
    ]
    args = pair_args(tmp_path, rows)
    source = make_source(args)
    [[[good, bad]], [[other, _]]] = generate_rollout(args, 0, source).samples
    tokenizer = make_tiny_tokenizer()
    for sample, text in ((good, "4<|im_end|>\n"), (bad, "five<|im_end|>\n")):
        trained = [
            t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m
        ]
        assert tokenizer.decode(trained) == text
    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert (good.response, bad.response) == ("4", "five")
    assert good.rollout_id == bad.rollout_id != other.rollout_id
    assert good.train_metadata == {"margin": 0.5} and other.train_metadata == {"margin": 0.0}
    assert_conserved(source)


def test_equal_answers_are_left_out_with_their_reason(tmp_path):
    rows = [{"chosen": answered("4"), "rejected": answered("4")}] + [
        {"chosen": answered("4"), "rejected": answered(text)} for text in "56"
    ]
    args = pair_args(tmp_path, rows)
    source = make_source(args)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 2
    assert output.metrics == {"rollout/pairs/skipped_same_answer": 1}
    assert_conserved(source)


def test_a_column_of_text_names_the_flags(tmp_path):
    args = pair_args(tmp_path, [{"chosen": "yes", "rejected": "no"}])
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 1: .*'chosen' \(--input-key\) is text"):
        generate_rollout(args, 0, make_source(args))


def test_responses_alone_follow_the_prompt_of_their_row(tmp_path):
    whole = {"chosen": answered("4"), "rejected": answered("five")}
    rows = [whole, {"prompt": ASK, "chosen": "4", "rejected": "five"}]
    rows.append({"prompt": ASK, **{name: talk[-1:] for name, talk in whole.items()}})
    args = pair_args(tmp_path, [rows[0], {"prompt": None} | rows[0]])
    [[[expected, _]], _] = generate_rollout(args, 0, make_source(args)).samples
    args = pair_args(tmp_path, rows[1:], "--metadata-columns", "prompt")
    for [[good, bad]] in generate_rollout(args, 0, make_source(args)).samples:
        assert good.tokens == expected.tokens and good.loss_mask == expected.loss_mask
        assert bad.tokens != good.tokens
