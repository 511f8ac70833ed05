"""Rows become samples: labels, metadata, tools, templates and media."""

import pytest
from tiny_model import make_tiny_tokenizer

from slime.data.prompt_rows import PromptFormat, fill_media, row_to_sample


def test_label_metadata_and_tools_are_read_also_from_json_text():
    row = {"q": "hi", "a": "3", "metadata": '{"rm_type": "math"}', "tools": '[{"name": "f"}]'}
    sample = row_to_sample(row, PromptFormat(input_key="q", label_key="a"))
    assert sample.prompt == "hi" and sample.label == "3"
    assert sample.metadata == {"rm_type": "math", "tools": [{"name": "f"}]}


def test_a_missing_column_names_the_flag_and_the_columns():
    with pytest.raises(
        ValueError, match=r"f\.jsonl, row 2: no column 'q' \(--input-key\); the row has \['a'\]"
    ):
        row_to_sample({"a": 1}, PromptFormat(input_key="q"), where="f.jsonl, row 2")
    with pytest.raises(ValueError, match="--label-key"):
        row_to_sample({"input": "x"}, PromptFormat(label_key="label"))


def test_metadata_that_is_no_object_is_an_error():
    with pytest.raises(ValueError, match="--metadata-key"):
        row_to_sample({"input": "x", "metadata": [1]}, PromptFormat())
    with pytest.raises(ValueError, match="not valid JSON"):
        row_to_sample({"input": "x", "metadata": "{oops"}, PromptFormat())


def test_the_chat_template_turns_text_into_a_question():
    fmt = PromptFormat(apply_chat_template=True)
    sample = row_to_sample({"input": "hi"}, fmt, make_tiny_tokenizer())
    assert sample.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_kwargs_reach_the_template():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}:{{ messages[0]['content'] }}"
    fmt = PromptFormat(apply_chat_template=True, apply_chat_template_kwargs={"mood": "calm"})
    assert row_to_sample({"input": "hi"}, fmt, tokenizer).prompt == "calm:hi"


def test_a_tokenizer_without_template_is_an_error():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--apply-chat-template"):
        row_to_sample({"input": "hi"}, PromptFormat(apply_chat_template=True), tokenizer)


def test_messages_stay_messages_without_a_template():
    messages = [{"role": "user", "content": "hi"}]
    assert row_to_sample({"input": messages}, PromptFormat()).prompt == messages


def test_media_replace_their_placeholders_in_order():
    messages = [{"role": "user", "content": "a<image>b<image>"}]
    filled = fill_media(
        messages, {"images": ["one.png", {"type": "image", "image": "two.png"}]}, {"image": "images"}
    )
    assert filled[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "one.png"},
        {"type": "text", "text": "b"},
        {"type": "image", "image": "two.png"},
    ]


@pytest.mark.parametrize("images", [None, []])
def test_a_row_without_media_keeps_its_text_whole(images):
    messages = [{"role": "user", "content": "what is 2+2?"}]
    assert fill_media(messages, {"images": images}, {"image": "images"}) == messages


def test_counts_of_media_and_placeholders_must_match():
    with pytest.raises(ValueError, match="more <image> placeholders"):
        fill_media([{"role": "user", "content": "<image><image>"}], {"images": ["a"]}, {"image": "images"})
    with pytest.raises(ValueError, match="fewer placeholders in the prompt than images"):
        fill_media([{"role": "user", "content": "<image>"}], {"images": ["a", "b"]}, {"image": "images"})
    with pytest.raises(ValueError, match="only columns of images and videos"):
        fill_media([], {}, {"smell": "x"})
