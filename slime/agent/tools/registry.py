"""Tools of an agent: typed Python functions, which a model sees as JSON schemas and calls.

A mistake of the model in a call is returned to it as a sentence with the mistake and its fix, never as an
exception. ToolServerDied means that tools are gone and the episode cannot continue. Schemas and checks do not
use pydantic, because it is not installed everywhere that slime runs, and its errors are longer and show no
correct call.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import logging
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slime.agent.session import Session, SessionError
from slime.rollout import episode_record

logger = logging.getLogger(__name__)

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_WORDS = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
_WORDS |= {"array": "a list", "object": "an object"}
_DEADLINE_S = 120.0
_MAX_CHARS = 10_000


class ToolError(Exception):
    """Raised by a tool for what the model did wrong: the message is for the model."""


class ToolServerDied(RuntimeError):
    """The server behind a tool is gone; no further call can work."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result that the model reads. `is_error`: the call failed, and `text` says why."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: `parameters` is the JSON schema of an object whose entries `call` takes as keywords.

    After a crash (`repeatable`, `survives`): docs/agents.md. Both are attributes of `call`, or of its object.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[..., Any]

    def after_a_crash(self) -> dict[str, Any]:
        """Return whether a call may be made again, and whether its effects survive this process."""
        call, owner = self.call, getattr(self.call, "__self__", None)
        is_plain = isinstance(call, types.FunctionType) and not call.__closure__
        own = is_plain or callable(getattr(owner, "save", None))
        repeatable = getattr(call, "repeatable", getattr(owner, "repeatable", False))
        survives = getattr(call, "survives", getattr(owner, "survives", own))
        return {"repeatable": bool(repeatable), "survives": bool(survives), "owner": owner}

    def schema(self) -> dict[str, Any]:
        """Return the description that chat templates and OpenAI's API take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def tool_of(function: Callable[..., Any], *, name: str | None = None) -> Tool:
    """Make a tool of a typed function, async or plain. The model reads its docstring."""
    name = name or function.__name__
    hints = typing.get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: *{parameter.name} cannot be shown to a model; name each argument")
        if parameter.name not in hints:
            raise TypeError(
                f"tool {name}: argument {parameter.name!r} has no type; write `{parameter.name}: str`"
            )
        entry = schema_of(hints[parameter.name], f"tool {name}, argument {parameter.name!r}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            entry = {**entry, "default": parameter.default}
        properties[parameter.name] = entry
    text = inspect.getdoc(function)
    if not text:
        raise TypeError(f"tool {name} has no docstring: the model needs a sentence that says what it does")
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name, text, parameters, function)


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type; TypeError for one that JSON cannot write."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return {**schema_of(parts[0], where), "description": str(parts[1])}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is typing.Literal:
        return {"type": _PLAIN[type(parts[0])], "enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in parts if part is not type(None)]
        if len(kinds) == 1:  # `str | None`: it may be left out
            return schema_of(kinds[0], where)
        return {"anyOf": [schema_of(kind, where) for kind in kinds]}
    if hint is list or origin is list:
        return {"type": "array", "items": schema_of(parts[0], where) if parts else {}}
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(
        f"{where} has the type {hint}, which JSON cannot write; use str, int, float, bool, list or dict"
    )


@dataclass(slots=True)
class ToolSet:
    """The tools of an episode. Calls of a turn run concurrently; results have the order of calls."""

    functions: Iterable[Callable[..., Any] | Tool] = ()
    timeout_s: float = _DEADLINE_S  # of one call
    max_chars: int = _MAX_CHARS  # of one result; the middle of a longer one is left out
    num_calls: int = field(default=0, init=False)
    num_errors: int = field(default=0, init=False)
    by_name: dict[str, Tool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for function in self.functions:
            self.add(function)

    def add(self, function: Callable[..., Any] | Tool) -> None:
        tool = function if isinstance(function, Tool) else tool_of(function)
        if tool.name in self.by_name:
            raise ValueError(f"there are two tools of the name {tool.name!r}; rename one")
        self.by_name[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.by_name.values()]

    @property
    def counts(self) -> dict[str, int]:
        """The counts for the metadata of an episode's samples."""
        return {"tool_calls": self.num_calls, "tool_errors": self.num_errors}

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Run the calls of a turn and return tool messages (arguments may be a dict or JSON text)."""

        async def message(identity: Any, name: str, arguments: Any) -> dict[str, Any]:
            result = await self.call(name, arguments, call_id=identity)
            return {"role": "tool", "tool_call_id": identity, "name": name, "content": result.text}

        asked = [(call.get("id"), call["function"]) for call in calls]
        return await asyncio.gather(*(message(i, f["name"], f.get("arguments")) for i, f in asked))

    async def call(self, name: str, arguments: Any = None, *, call_id: Any = None) -> ToolResult:
        """Run one call with the arguments that the model wrote.

        In a recorded episode a call that a crash has interrupted, or has come after, is not made twice.
        """
        self.num_calls += 1
        record, tool = episode_record.current(), self.by_name.get(name)
        if record is None or tool is None:
            text, is_error = await self._result(name, arguments)
        else:
            make = partial(self._result, name, arguments)
            text, is_error = await record.once([name, arguments, call_id], make, **tool.after_a_crash())
        self.num_errors += is_error
        return ToolResult(text, is_error)

    async def _result(self, name: str, arguments: Any) -> list[Any]:
        try:
            return [shorten(await self._run(name, arguments), self.max_chars), False]
        except ToolError as error:
            return [f"error: {error}", True]

    async def _run(self, name: str, arguments: Any) -> str:
        tool = self.by_name.get(name)
        if tool is None:
            near = difflib.get_close_matches(str(name), self.by_name, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ToolError(
                f"there is no tool {name!r}; {hint}the tools are: {', '.join(self.by_name) or 'none'}"
            )
        given = read_arguments(tool, arguments)
        try:
            async with asyncio.timeout(self.timeout_s):
                if inspect.iscoroutinefunction(tool.call):
                    value = await tool.call(**given)
                else:
                    value = await asyncio.to_thread(tool.call, **given)
                    value = await value if inspect.isawaitable(value) else value
        except TimeoutError:
            raise ToolError(f"{name} did not respond within {self.timeout_s:g} s") from None
        except (ToolError, ToolServerDied):
            raise
        except Exception as error:
            logger.warning(
                "Tool %s raised an exception; the model gets an error message.", name, exc_info=True
            )
            raise ToolError(f"{name} failed: {type(error).__name__}: {error}") from error
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def read_arguments(tool: Tool, arguments: Any) -> dict[str, Any]:
    """Return the model's arguments as keywords; ToolError with an example if they do not fit."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ToolError(f"the arguments of {tool.name} are not JSON ({error}); {_lesson(tool)}") from None
    given = {} if arguments is None else arguments
    if not isinstance(given, dict):
        raise ToolError(f"the arguments of {tool.name} must be an object; {_lesson(tool)}")
    properties = tool.parameters.get("properties", {})
    for key in given:
        if key not in properties and tool.parameters.get("additionalProperties") is not True:
            raise ToolError(f"{tool.name} has no argument {key!r}; {_lesson(tool)}")
    for key in tool.parameters.get("required", ()):
        if key not in given:
            raise ToolError(f"{tool.name} needs the argument {key!r}; {_lesson(tool)}")
    return {key: _fitting(tool, key, value, properties.get(key, {})) for key, value in given.items()}


def _fitting(tool: Tool, key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(map(json.dumps, schema["enum"]))
        raise ToolError(f"{key} of {tool.name} is {json.dumps(value)}; choose from {choices}")
    if value is None and "default" in schema:
        return schema["default"]
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
    expected = wanted.get(kind, object) if isinstance(kind, str) else object
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        shown = json.dumps(value, ensure_ascii=False)[:60]
        raise ToolError(f"{key} of {tool.name} must be {_WORDS[str(kind)]}, not {shown}; {_lesson(tool)}")
    return value


def _lesson(tool: Tool) -> str:
    """Return an example of a right call."""
    examples = {"string": "...", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    shown = {}
    for key in tool.parameters.get("required", ()):
        schema = tool.parameters.get("properties", {}).get(key, {})
        shown[key] = schema["enum"][0] if schema.get("enum") else examples.get(schema.get("type"), "...")
    return f"write them as {json.dumps(shown)}"


def shorten(text: str, max_chars: int) -> str:
    """Keep the start and the end of a long text, with the number of characters left out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - max_chars} characters left out]\n{text[half - max_chars :]}"


async def answer_with_tools(session: Session, messages: list[dict[str, Any]], tools: ToolSet) -> str:
    """Take turns until the model responds without a call, and return its text; "" if a budget ends it first.

    Each turn and its tool results are appended to `messages`. `Session.outcome` says how it ended.
    """
    new, said = list(messages), None
    try:
        while True:
            said = await session.turn(new, tools=tools.schemas, after=said)
            messages.append(said.message)
            if not said.tool_calls:
                return said.text
            new = await tools.answer(said.tool_calls)
            messages += new
    except SessionError as error:
        session.end(error.outcome, str(error))
        return ""
