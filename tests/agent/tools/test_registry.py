"""Typed functions as tools: what the model is shown, and what it reads after a wrong call."""

import asyncio
import json
from typing import Annotated, Literal

import pytest

from slime.agent.tools import Tool, ToolError, ToolServerDied, ToolSet, tool_of


def mix(
    amount: Annotated[float, "in litres"],
    colours: list[Literal["red", "blue"]],
    times: int = 1,
    note: str | None = None,
    main: Literal["red", "blue"] = "red",
) -> str:
    """Mixes paint."""
    return f"{amount:g} {'+'.join(colours)} x{times} {note}"


def call(tools, name, arguments=None):
    return asyncio.run(tools.call(name, arguments))


def test_a_typed_function_becomes_a_json_schema():
    schema = tool_of(mix).schema()
    assert schema["function"]["name"] == "mix"
    assert schema["function"]["description"] == "Mixes paint."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "description": "in litres"},
            "colours": {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}},
            "times": {"type": "integer", "default": 1},
            "note": {"type": "string", "default": None},
            "main": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        },
        "required": ["amount", "colours"],
    }


def test_arguments_come_as_an_object_or_as_json():
    tools = ToolSet([mix])
    arguments = {"amount": 2, "colours": ["red", "blue"], "times": 3}
    for form in (arguments, json.dumps(arguments)):
        result = call(tools, "mix", form)
        assert (result.text, result.is_error) == ("2 red+blue x3 None", False)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("mixx", {}, "there is no tool 'mixx'; did you mean mix? the tools are: mix"),
        ("mix", '{"amount": ', "not JSON"),
        ("mix", "[1]", 'must be an object; write them as {"amount": 1.5, "colours": []}'),
        ("mix", {"amount": 1}, "needs the argument 'colours'"),
        ("mix", {"amount": 1, "colours": [], "size": 1}, "has no argument 'size'"),
        ("mix", {"amount": "much", "colours": []}, 'amount of mix must be a number, not "much"'),
        ("mix", {"amount": True, "colours": []}, "amount of mix must be a number, not true"),
        ("mix", {"amount": 1, "colours": [], "times": True}, "times of mix must be a whole number, not true"),
        ("mix", {"amount": 1, "colours": [], "main": "green"}, 'choose from "red", "blue"'),
    ],
)
def test_a_wrong_call_teaches_the_model(name, arguments, told):
    tools = ToolSet([mix])
    result = call(tools, name, arguments)
    assert result.is_error
    assert result.text.startswith("error: ")
    assert told in result.text
    assert (tools.num_calls, tools.num_errors) == (1, 1)


def test_a_tool_that_raises_or_hangs_answers_with_an_error():
    def breaks() -> str:
        """Breaks."""
        raise KeyError("door")

    def refuses() -> str:
        """Refuses."""
        raise ToolError("ask for something else")

    async def hangs() -> str:
        """Hangs."""
        await asyncio.sleep(1000)
        return ""

    tools = ToolSet([breaks, refuses])
    assert call(tools, "breaks").text == "error: breaks failed: KeyError: 'door'"
    assert call(tools, "refuses").text == "error: ask for something else"
    assert (
        call(ToolSet([hangs], timeout_s=0.05), "hangs").text == "error: hangs did not respond within 0.05 s"
    )


def test_a_server_that_is_gone_ends_the_episode():
    def gone() -> str:
        """Is gone."""
        raise ToolServerDied("the server ended")

    with pytest.raises(ToolServerDied):
        call(ToolSet([gone]), "gone")


def test_calls_of_a_turn_are_answered_in_their_order_and_beside_each_other():
    seen = asyncio.Event()

    async def first() -> str:
        """Waits for the second."""
        await seen.wait()
        return "1"

    async def second() -> dict:
        """Lets the first go on."""
        seen.set()
        return {"two": 2}

    functions = [{"name": "first", "arguments": "{}"}, {"name": "second"}]
    calls = [{"id": f"c{i}", "function": function} for i, function in enumerate(functions)]
    answers = asyncio.run(ToolSet([first, second]).answer(calls))
    assert [one["content"] for one in answers] == ["1", '{"two": 2}']
    assert [one["tool_call_id"] for one in answers] == ["c0", "c1"]
    assert {one["role"] for one in answers} == {"tool"}


def test_a_long_result_keeps_its_ends():
    def long() -> str:
        """Is long."""
        return "a" * 50 + "b" * 50

    text = call(ToolSet([long], max_chars=20), "long").text
    assert text == "a" * 10 + "\n[80 characters left out]\n" + "b" * 10


def test_functions_that_cannot_be_shown_are_refused_when_they_are_added():
    def untyped(x) -> str:
        """Has no types."""

    def silent(x: int) -> str: ...

    def strange(x: object) -> str:
        """Takes anything."""

    def many(*x: int) -> str:
        """Takes many."""

    wrong = {untyped: "no type", silent: "no docstring", strange: "JSON", many: "each argument"}
    for function, told in wrong.items():
        with pytest.raises(TypeError, match=told):
            tool_of(function)
    with pytest.raises(ValueError, match="two tools of the name 'mix'"):
        ToolSet([mix, Tool("mix", "", {}, mix)])
