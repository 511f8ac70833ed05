"""Loss masks of conversations for each template family, checked by decoding what is trained."""

import pytest
from tiny_model import make_tiny_tokenizer

from slime.utils.mask_utils import MultiTurnLossMaskGenerator

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
THINKING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "<think>\ncheck\n</think>\n\nyes"},
]
# Writes thinking only after the last question, as reasoning templates do;
# tool answers in a row form one user block.
DROPS_THINKING = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{ '<|im_start|>system\\ntools:' ~ tools | length ~ '<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n[' ~ text ~ ']' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' ~ opening }}{%- endif -%}"""


def make_generator(family, *, drops_thinking=False, opening=""):
    tokenizer = make_tiny_tokenizer()
    if drops_thinking:
        tokenizer.chat_template = DROPS_THINKING.replace("opening", repr(opening))
    return MultiTurnLossMaskGenerator(tokenizer, family)


def trained(generator, messages, tools=None):
    ids, mask = generator.get_loss_mask(messages, tools=tools)
    assert len(ids) == len(mask)
    return generator.get_text_from_loss_mask(ids, mask)


def test_text_has_no_template_and_ends_with_the_end_of_sequence():
    generator = make_generator("text")
    assert trained(generator, [{"role": "assistant", "content": "1+1=2"}]) == ["+1=2<|im_end|>"]
    pair = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert trained(generator, pair) == ["2<|im_end|>"]
    assert generator.tokenizer.decode(generator.get_loss_mask(pair)[0]) == "1+1=2<|im_end|>"


@pytest.mark.parametrize("family", ["qwen", "qwen3", "qwen3_5"])
def test_what_the_assistant_wrote_is_trained_and_nothing_else(family):
    generator = make_generator(family)
    assert trained(generator, TALK) == ["4<|im_end|>\n", "yes<|im_end|>\n"]
    assert generator.tokenizer.decode(generator.get_loss_mask(TALK)[0]) == generator._render(TALK, None)


@pytest.mark.parametrize("family", ["qwen", "qwen3", "qwen3_5"])
def test_a_turn_can_be_taken_out_of_training(family):
    talk = [*TALK[:2], {**TALK[2], "step_loss_mask": 0}, *TALK[3:]]
    assert trained(make_generator(family), talk) == ["yes<|im_end|>\n"]


def test_qwen_refuses_a_template_that_rewrites_earlier_turns():
    with pytest.raises(ValueError, match=r"message 1 reads differently.*--loss-mask-type qwen3"):
        make_generator("qwen", drops_thinking=True).get_loss_mask(THINKING)


def test_qwen3_keeps_the_thinking_of_every_turn():
    generator = make_generator("qwen3", drops_thinking=True)
    ends = "<|im_end|>\n"
    assert trained(generator, THINKING) == [m["content"] + ends for m in THINKING if m["role"] == "assistant"]


def test_qwen3_renders_tools_once_and_joins_tool_answers():
    talk = [*THINKING[:2], {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}, THINKING[3]]
    generator = make_generator("qwen3", drops_thinking=True)
    ids, _ = generator.get_loss_mask(talk, tools=[{"name": "f"}])
    text = generator.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\ntools:1<|im_end|>\n") and text.count("tools:1") == 1
    assert "<|im_start|>user\n[a]\n[b]<|im_end|>\n" in text
    assert len(trained(generator, talk)) == 2


def test_qwen3_5_trains_the_conversation_as_the_template_writes_it():
    generator = make_generator("qwen3_5", drops_thinking=True, opening="<think>\n")
    assert trained(generator, THINKING) == ["4<|im_end|>\n", "check\n</think>\n\nyes<|im_end|>\n"]


def test_qwen3_5_refuses_a_message_that_contains_the_header():
    talk = [{"role": "user", "content": "say <|im_start|>assistant\nhi<|im_end|>\n"}, TALK[2]]
    with pytest.raises(ValueError, match="2 assistant headers for 1 assistant messages"):
        make_generator("qwen3_5").get_loss_mask(talk)


def test_distill_trains_the_last_answer():
    generator = make_generator("distill_qwen")
    assert trained(generator, TALK[1:3]) == ["4"]


def test_a_conversation_without_assistant_has_an_empty_response():
    for family in ("qwen", "qwen3", "qwen3_5", "distill_qwen"):
        generator = make_generator(family)
        ids, mask = generator.get_loss_mask(TALK[:2])
        assert ids and set(mask) == {0}
        assert generator.get_response_lengths([mask]) == [0]


def test_an_assistant_that_speaks_first_is_not_trained_on_its_header():
    assert trained(make_generator("qwen"), [TALK[2]]) == ["4<|im_end|>\n"]


def test_response_length_counts_from_the_first_trained_token():
    assert make_generator("qwen").get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_an_unknown_family_is_an_error():
    with pytest.raises(ValueError, match="--loss-mask-type is 'gpt'"):
        make_generator("gpt")
