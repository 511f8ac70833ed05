"""Fields that ask for nothing here: a cache, a tier, a number for accounts. Their types are checked, no more.

A shape is a type, a list of one shape, or fields with theirs: "*" stands for all others, and "!" behind a
name says that it must be there. Null is taken for absent. Which words a field may hold is not checked: the
SDKs know new ones with every release.
"""

from __future__ import annotations

from typing import Any

from slime.agent.adapters.client_errors import invalid, want

Shape = type | list[Any] | dict[str, Any]

_WORDS = {str: "a string", bool: "a boolean", int: "an integer", list: "an array", dict: "an object"}
_TEXTS: Shape = {"*": str}
_CACHE: Shape = {"type!": str}
_OPENAI: dict[str, Shape] = {
    "metadata": _TEXTS,
    "moderation": dict,
    "parallel_tool_calls": bool,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "user": str,
}
CHAT: dict[str, Shape] = {**_OPENAI, "prediction": dict, "reasoning_effort": str, "verbosity": str}
CHAT_MESSAGE: dict[str, Shape] = {"name": str}
RESPONSES: dict[str, Shape] = {
    **_OPENAI,
    "access_programs": dict,
    "context_management": list,
    "image": dict,
    "include": [str],
    "max_tool_calls": int,
    "reasoning": {"effort": str, "summary": str},
    "stream_options": dict,
    "truncation": str,
}
RESPONSES_ITEM: dict[str, Shape] = {"id": str, "status": str}
FUNCTION: dict[str, Shape] = {"strict": bool}
ANTHROPIC: dict[str, Shape] = {
    "cache_control": _CACHE,
    "diagnostics": dict,
    "inference_geo": str,
    "metadata": {"user_id": str},
    "service_tier": str,
    "speed": str,
    "thinking": {"type!": str, "budget_tokens": int},
    "user_profile_id": str,
    "workspace_id": str,
}
PART: dict[str, Shape] = {"annotations": [dict], "cache_control": _CACHE, "is_error": bool, "signature": str}


def check_unused(given: dict[str, Any], shapes: dict[str, Shape], where: str = "") -> None:
    """ApiError where one of the fields cannot be what its SDK declares."""
    for name in shapes.keys() & given.keys():
        _check(given[name], shapes[name], f"{where}.{name}" if where else name)


def _check(value: Any, shape: Shape, where: str) -> None:
    if value is not None:
        _check_given(value, shape, where)


def _check_given(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, list):
        for place, one in enumerate(want(value, list, where, "an array")):
            _check_given(one, shape[0], f"{where}[{place}]")
    elif isinstance(shape, dict):
        want(value, dict, where, "an object")
        for name in (name[:-1] for name in shape if name.endswith("!")):
            if value.get(name) is None:
                raise invalid(f"Missing required parameter: '{where}.{name}'.", f"{where}.{name}")
        for name, one in value.items():
            inner = shape.get(name, shape.get(f"{name}!", shape.get("*")))
            if inner is not None:
                _check(one, inner, f"{where}.{name}")
    else:
        want(value, shape, where, _WORDS[shape])
