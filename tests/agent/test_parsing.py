"""Tool calls and thoughts of each family, and what cannot be read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.agent.parsing import ParsedModelOutput, parse_model_output, parser_for
from slime.catalog.tool_formats import TOOL_FORMATS, recognised
from slime.utils.misc import is_installed, load_function

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

CANNOT_BE_TOLD = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "</tool_call>",
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": -Infinity}}',
        '{"name": "add", "parameters": ' + '{"a":' * 9**6,
    ],
    "pythonic": ["[add(a={1, 2})]", "[add(a=b'x')]", "[add(a=2j)]", "[add(a={(1, 2): 3})]", "[add(a=...)]"],
    "glm": ["<tool_call>add<arg_key>a</arg_key><arg_value>Infinity</arg_value></tool_call>"],
    "deepseek": [WRITTEN["deepseek"].replace('"a": 1', '"a": NaN')],
}


@pytest.mark.parametrize(("name", "texts"), CANNOT_BE_TOLD.items())
def test_a_call_that_no_client_could_read_stays_text(name, texts):
    """Numbers that JSON does not have, half of a surrogate pair, Python's own values, any depth."""
    for text in texts:
        parsed = parse_model_output(text, tools_schema=TOOLS, tool_parser_name=name)
        assert parsed == ParsedModelOutput("", text, [], ill_formed=True), text[:80]


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


# -- SGLang's own parsers, in the Python that has SGLang

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
# Formats that only SGLang reads.
THEIRS = {
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "s": "2"}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "s": "2"}<|tool_call_end|><|tool_calls_section_end|>',
}
SCRIPT = """
import json, sys
from slime.agent.parsing import ParsedModelOutput, parse_model_output, parser_for

tools, written = json.load(sys.stdin)
told = {}
for name, text in written.items():
    options = dict(tools_schema=tools, tool_parser_name=f"sglang:{name}")
    options["reasoning_parser_name"] = "sglang:qwen3"
    found = parse_model_output("<think>so</think>" + text, **options)
    parse_model_output(text[: int(len(text) * 0.6)], **options)  # cut: some of its parsers read half a call
    plain = parse_model_output("no call at all", **options)
    told[name] = [found.reasoning, found.tool_uses, found.ill_formed]
    told[name] += [plain.text, plain.ill_formed]
unknown = json.dumps({"name": "nope", "arguments": {}})
told["unknown tool"] = parse_model_output(
    f"<tool_call>\\n{unknown}\\n</tool_call>", tools_schema=tools, tool_parser_name="sglang:qwen25"
).tool_uses
told["broken"] = parse_model_output(
    "<tool_call>\\n{not json}\\n</tool_call>", tools_schema=tools, tool_parser_name="sglang:qwen25"
).ill_formed
try:
    parser_for(None, "sglang:martian")
except ValueError as error:
    told["martian"] = str(error)
print("TOLD" + json.dumps(told))
"""


@pytest.mark.skipif(is_installed("sglang"), reason="SGLang is installed here")
def test_without_sglang_its_parsers_are_refused_with_what_to_do():
    for options in ({"tool_parser_name": "sglang:qwen25"}, {"reasoning_parser_name": "sglang:qwen3"}):
        with pytest.raises(ValueError, match="needs SGLang in the Python that runs slime"):
            parse_model_output("x", tools_schema=TOOLS, **options)


@pytest.mark.sglang
@pytest.mark.skipif(not PYTHON.exists(), reason="make sglang-env")
def test_sglangs_parsers_read_what_ours_read_and_the_formats_that_only_they_know():
    written = {row.sglang_name: WRITTEN[name] for name, row in TOOL_FORMATS.items() if row.sglang_name}
    written |= THEIRS
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT],
        input=json.dumps([TOOLS, written]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.rpartition("TOLD")[2])
    for name in written:
        thoughts, uses, ill_formed, text, text_ill_formed = told[name]
        assert (thoughts, uses, ill_formed) == ("so", [ADD], False), name
        assert (text, text_ill_formed) == ("no call at all", False), name
    assert told["unknown tool"] == [{"name": "nope", "input": {}}]
    assert told["broken"] is True
    assert "SGLang has no tool_parser 'martian'; it has" in told["martian"]


def test_what_is_no_list_of_calls_stays_text_without_assertions_too():
    code = (
        "from slime.agent.parsing.formats import parse_pythonic;"
        "print(parse_pythonic('[a for a in b]', {}) == ('[a for a in b]', [], False))"
    )
    told = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"
