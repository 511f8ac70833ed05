"""Rewards see the answer without special tokens, whichever reward and whichever family's tokens."""

import asyncio
import json

import pytest
from argument_helpers import declared
from tiny_model import make_tiny_tokenizer

from slime.rollout.response_text import (
    ending_of,
    share_with_ending,
    special_tokens_of,
    without_special_tokens,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm, response_text, score_samples
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.rm_hub.workers.check_pool import close_pools
from slime.utils.types import Sample

ENDS = [
    "<|im_end|>",  # Qwen and others with ChatML
    "<|endoftext|>",
    "<|eot_id|>",  # Llama 3
    "<|end_of_text|>",
    "<|eot|>",
    "</s>",  # Llama 2, Mistral
    "<end_of_turn>",  # Gemma
    "<eos>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "<|user|>",  # GLM ends its turn by the next one's begin
    "<|observation|>",
    "<|end|>",  # Phi
    "<|return|>",  # gpt-oss
    "<|END_OF_TURN_TOKEN|>",  # Command
    "[|endofturn|]",  # EXAONE
    "[EOS]",
    "<end_of_utterance>",  # Idefics, SmolVLM
    "[/INST]",
    "<|im_end|>\n<|endoftext|>",
    "<|im_end|>" * 40 + " \n",
    " \n</s>",
]
# (type, right answer, label, metadata, score)
RIGHT = [
    ("math", r"so \boxed{42}", "42", {}, 1),
    ("math", r"so \boxed 42", "42", {}, 1),
    ("boxed_math", r"so \boxed{42}", "42", {}, 1),
    ("deepscaler", r"<think>hm</think> \boxed 42", "42", {}, 1),
    ("boxed_deepscaler", r"<think>hm</think> \boxed{42}", "42", {}, 1),
    ("dapo", "so\nAnswer: 42", "42", {}, 1.0),
    ("dapo", "so\nAnswer: \\boxed{42}", "42", {}, 1.0),
    ("boxed_dapo", "so\nAnswer: \\boxed{42}", "42", {}, 1.0),
    ("boxed_dapo", r"\boxed{Answer: 42}", "42", {}, 1.0),
    ("f1", "forty two", "forty two", {}, 1.0),
    ("boxed_f1", r"so \boxed{forty two}", "forty two", {}, 1.0),
    ("gpqa", "I thought.\nC", "C", {}, 1.0),
    ("gpqa", "in words", "in words", {}, 1.0),
    (
        "ifbench",
        "The end.",
        None,
        {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "The end."}]},
        1.0,
    ),
    ("ifbench", '{"a": 1}', None, {"instruction_id_list": ["detectable_format:json_format"]}, 1.0),
]


@pytest.fixture(scope="module", autouse=True)
def _no_workers_left():
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _fresh():
    reset_breaker()


@pytest.mark.parametrize("rm_type, response, label, metadata, score", RIGHT)
def test_a_right_answer_is_right_with_every_family_s_end_tokens(rm_type, response, label, metadata, score):
    args = declared(rm_type=rm_type)
    samples = [
        Sample(index=i, response=response + end, label=label, metadata=metadata)
        for i, end in enumerate(["", *ENDS])
    ]
    values = asyncio.run(batched_async_rm(args, samples))
    scores = [value["score"] if isinstance(value, dict) else value for value in values]
    assert dict(zip(["", *ENDS], scores, strict=True)) == dict.fromkeys(["", *ENDS], score)
    assert [sample.response for sample in samples] == [
        response + end for end in ["", *ENDS]
    ]  # it is the user's


def test_the_coin_and_the_judge_see_the_answer_without_its_end(monkeypatch):
    sent = []

    async def judge(url, payload, **options):
        sent.append(payload["response"])
        return 1.0

    monkeypatch.setattr("slime.rollout.rm_hub.remote.post", judge)
    sample = Sample(index=3, prompt="p", response="yes<|im_end|>", label="yes")
    assert asyncio.run(async_rm(declared(rm_type="remote_rm", rm_url="http://judge"), sample)) == 1.0
    assert sent == ["yes"]
    bare = Sample(index=3, response="yes")
    coins = [asyncio.run(async_rm(declared(rm_type="random"), one)) for one in (sample, bare)]
    assert coins[0] == coins[1]


@pytest.mark.parametrize(
    "text, clean, ending",
    [
        ("42", "42", None),
        ("42 \n", "42 \n", None),  # nothing to take off, so nothing is
        ("", "", None),
        ("<|im_end|>", "", "<|im_end|>"),
        ("42 <|im_end|> \n</s>\n", "42", "</s>"),
        ("a |> b", "a |> b", None),
        ("x < y|>", "x < y|>", None),
        ("<|a b|>", "<|a b|>", None),
        ("<think>hm</think>", "<think>hm</think>", None),
        ("[1, 2]", "[1, 2]", None),
        ("<b>bold</b>", "<b>bold</b>", None),
        ("said <|im_end|> twice", "said <|im_end|> twice", None),  # no tokenizer says that it is one
    ],
)
def test_only_special_tokens_are_taken_off_the_end(text, clean, ending):
    assert without_special_tokens(text) == clean
    assert ending_of(text) == ending


def test_the_run_s_own_special_tokens_go_wherever_they_stand(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["«turn»", "</think>", "!"]})
    tokenizer.save_pretrained(tmp_path)
    tokens = special_tokens_of(str(tmp_path))
    assert "«turn»" in tokens and tokenizer.eos_token in tokens
    assert "</think>" not in tokens and "!" not in tokens  # rewards read the one, people write the other
    args = declared(hf_checkpoint=str(tmp_path), rm_type="dapo")
    sample = Sample(index=0, response="«turn»hm</think> so!\nAnswer: 4«turn»2«turn»", label="42")
    assert response_text(args, sample) == "hm</think> so!\nAnswer: 42"
    assert asyncio.run(async_rm(args, sample))["acc"]


def test_a_model_folder_without_a_tokenizer_still_has_answers_with_ends(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    sample = Sample(index=0, response="42<|im_end|>")
    assert response_text(declared(hf_checkpoint=str(tmp_path)), sample) == "42"


def test_answers_that_end_in_a_token_are_counted():
    answers = ["42<|im_end|>", "x" * 500 + "</s> \n", "42", ""]
    assert share_with_ending([Sample(index=0, response=answer) for answer in answers]) == 0.5


def test_built_in_rewards_do_not_mind_them():
    args = declared(
        rm_type="f1",
        reward_key=None,
        limits={"reward-retries": 0, "reward-failures": 1},
        reward_failure_action="stop",
    )
    sample = Sample(index=0, response="yes<|im_end|>", label="yes")
    asyncio.run(score_samples(args, [sample]))
    assert sample.reward == 1.0
