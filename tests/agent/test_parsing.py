"""Tool calls and thoughts of each family, and what cannot be read."""

import pytest

from slime.agent.parsing import parse_model_output, parser_for
from slime.catalog.tool_formats import TOOL_FORMATS, recognised
from slime.utils.misc import load_function

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "on": {"type": "boolean"}},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ADD = {"name": "add", "input": {"a": 1, "s": "2"}}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "2"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=s>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1, "s": "2"}}',
    "pythonic": "[add(a=1, s='2')]",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "s": "2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
TWICE = {
    "llama3": WRITTEN["llama3"] + "; " + WRITTEN["llama3"],
    "pythonic": "[add(a=1, s='2'), add(a=1, s='2')]",
    "deepseek": WRITTEN["deepseek"].replace(
        "<｜tool▁calls▁end｜>", WRITTEN["deepseek"].removeprefix("<｜tool▁calls▁begin｜>")
    ),
}


def parse(text, name, **options):
    return parse_model_output(text, tools_schema=TOOLS, tool_parser_name=name, **options)


def test_every_format_of_the_table_has_a_function_and_an_example():
    assert set(WRITTEN) | {"plain"} == set(TOOL_FORMATS)
    for row in TOOL_FORMATS.values():
        assert callable(load_function(row.function))


@pytest.mark.parametrize("name", WRITTEN)
def test_one_call_is_read(name):
    parsed = parse(WRITTEN[name], name)
    assert parsed.tool_uses == [ADD] and not parsed.ill_formed and parsed.text == ""


@pytest.mark.parametrize("name", WRITTEN)
def test_several_calls_are_read_in_order(name):
    parsed = parse(TWICE.get(name, WRITTEN[name] + "\n" + WRITTEN[name]), name)
    assert parsed.tool_uses == [ADD, ADD]


@pytest.mark.parametrize("name", WRITTEN)
def test_thoughts_come_off_first(name):
    parsed = parse(f"<think>\nhm\n</think>\n\n{WRITTEN[name]}", name)
    assert parsed.reasoning == "hm" and parsed.tool_uses == [ADD]


@pytest.mark.parametrize("name", [*WRITTEN, "plain"])
def test_text_without_calls_stays_as_it_is(name):
    for text in ("just text", "", "a {curly} [square] <b>", "1 + 1 = 2\n"):
        parsed = parse(text, name)
        assert (parsed.text, parsed.tool_uses, parsed.ill_formed) == (text, [], False)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_was_cut_is_ill_formed_and_stays_text(name):
    text = WRITTEN[name][: len(WRITTEN[name]) * 2 // 3]
    parsed = parse(text, name)
    assert parsed.ill_formed and parsed.text == text and parsed.tool_uses == []


@pytest.mark.parametrize(
    "text", ["<tool_call>{not json}</tool_call>", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>']
)
def test_arguments_that_are_no_object_are_ill_formed(text):
    assert parse(text, "hermes").ill_formed


def test_values_follow_the_schema_of_the_tool():
    values = {"s": "7", "a": "7", "on": "True"}
    inner = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    text = f"<function=add>{inner}</function>"
    assert parse(text, "qwen3_coder").tool_uses[0]["input"] == {"s": "7", "a": 7, "on": True}


def test_a_prompt_that_opens_a_thought_gives_it_to_the_answer():
    assert parse("hm</think>yes", "hermes", opens_thought=True).reasoning == "hm"
    cut = parse("hm, still", "hermes", opens_thought=True)
    assert (cut.reasoning, cut.text) == ("hm, still", "")
    assert parse("hm</think>yes", "hermes", reasoning_parser_name="none").text == "hm</think>yes"


def test_without_tools_nothing_is_a_call():
    text = WRITTEN["hermes"]
    assert parse_model_output(text, tools_schema=None, tool_parser_name="hermes").text == text


def test_formats_are_known_by_sglangs_names_and_by_the_template():
    from chat_templates import FAMILIES, byte_tokenizer

    assert parse(WRITTEN["hermes"], "qwen25").tool_uses == [ADD]
    with pytest.raises(ValueError, match="there is no tool format 'nope'; use one of"):
        parse("", "nope")
    found = {family: recognised(row[0]) for family, row in FAMILIES.items()}
    assert found["qwen3"] == found["chatml"] == "hermes" and found["glm"] == "glm"
    assert found["llama3"] == "llama3" and found["deepseek"] == "deepseek" and found["smollm2"] == "plain"
    assert parser_for(byte_tokenizer("glm"))(WRITTEN["glm"], TOOLS, False).tool_uses == [ADD]
