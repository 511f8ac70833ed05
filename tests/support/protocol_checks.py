"""Whether a class does what a Protocol declares: members, parameters, types, as a type checker asks."""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from source_trees import nodes_of

_ABSENT = object()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences(protocol: type, cls: type) -> list[str]:
    """Why an object of `cls` is no `protocol`; empty: it is one."""
    return [
        f"{cls.__name__}.{name}: {why}" for name in members(protocol) for why in _compare(protocol, cls, name)
    ]


def members(protocol: type) -> list[str]:
    return (
        sorted(typing.get_protocol_members(protocol))
        if hasattr(typing, "get_protocol_members")
        else _members(protocol)
    )


def _members(protocol: type) -> list[str]:
    found = {name for name in vars(protocol) if not name.startswith("_")} | set(protocol.__annotations__)
    return sorted(found)


def _compare(protocol: type, cls: type, name: str) -> Iterator[str]:
    declared, own = inspect.getattr_static(protocol, name, None), inspect.getattr_static(cls, name, None)
    if isinstance(own, (staticmethod, classmethod)):
        own = own.__func__
    if not inspect.isfunction(declared):
        yield from _compare_value(cls, name, settable=not isinstance(declared, property))
    elif own is None:
        yield "missing"
    elif not callable(own):
        yield f"is {type(own).__name__}, declared as a method"
    else:
        yield from _compare_calls(declared, own, cls)


def _compare_value(cls: type, name: str, *, settable: bool) -> Iterator[str]:
    own = inspect.getattr_static(cls, name, _ABSENT)
    if inspect.isfunction(own):
        yield "is a method, declared as a value"
    elif isinstance(own, property) and settable and own.fset is None:
        yield "cannot be set, declared without @property"
    elif own is _ABSENT and name not in set(_values_set(cls)):
        yield "missing"


def _values_set(cls: type) -> Iterator[str]:
    """Names that the class annotates, declares as slots, or assigns on `self`."""
    for base in cls.__mro__[:-1]:
        yield from inspect.get_annotations(base)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made at run time, or not of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def _compare_calls(declared: Any, own: Any, cls: type) -> Iterator[str]:
    wanted, found = inspect.signature(declared), inspect.signature(own)
    if inspect.iscoroutinefunction(declared) != inspect.iscoroutinefunction(own):
        yield "one of both is async"
    there = dict(found.parameters)
    variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in there.values())
    for position, (name, parameter) in enumerate(wanted.parameters.items()):
        if name not in there:
            if not variadic:
                yield f"has no parameter {name!r}"
            continue
        yield from _compare_parameters(position, parameter, list(there).index(name), there[name])
    for name, parameter in there.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if needed and name not in wanted.parameters:
            yield f"needs {name!r}, which callers do not pass"
    yield from _compare_types(declared, own, cls)


def _compare_parameters(
    place: int, wanted: inspect.Parameter, own_place: int, own: inspect.Parameter
) -> Iterator[str]:
    if wanted.kind in _POSITIONAL and (own.kind not in _POSITIONAL or place != own_place):
        yield f"takes {wanted.name!r} at another place"
    if wanted.default is not wanted.empty and own.default is own.empty:
        yield f"needs {wanted.name!r}, which callers may leave out"
    elif wanted.default is not wanted.empty and own.default != wanted.default:
        yield f"{wanted.name!r} is {own.default!r} when left out, declared as {wanted.default!r}"


def _compare_types(declared: Any, own: Any, cls: type) -> Iterator[str]:
    """Parameters may take more, and the answer may be less, than was declared."""
    wanted, found = typing.get_type_hints(declared), typing.get_type_hints(own)
    for name, kind in wanted.items():
        kind = cls if kind is typing.Self else kind
        if name not in found:
            yield f"no type for {name!r}"
        elif not (_fits(found[name], kind) if name == "return" else _fits(kind, found[name])):
            yield f"{name!r} is {found[name]}, declared as {kind}"


def _fits(narrow: Any, wide: Any) -> bool:
    if isinstance(narrow, typing.TypeVar) or isinstance(wide, typing.TypeVar):
        return True  # the type checker's business
    if wide in (Any, object) or narrow in (Any, typing.Never, typing.NoReturn) or narrow == wide:
        return True
    narrow_parts, wide_parts = _alternatives(narrow), _alternatives(wide)
    if len(narrow_parts) > 1 or len(wide_parts) > 1:
        return all(any(_fits(part, other) for other in wide_parts) for part in narrow_parts)
    origin, wide_origin = typing.get_origin(narrow) or narrow, typing.get_origin(wide) or wide
    if not inspect.isclass(origin) or not inspect.isclass(wide_origin):
        return False
    if getattr(wide_origin, "_is_protocol", False) and wide_origin.__module__.startswith("slime"):
        return not differences(wide_origin, origin)
    return issubclass(origin, wide_origin)


def _alternatives(kind: Any) -> list[Any]:
    return (
        list(typing.get_args(kind)) if typing.get_origin(kind) in (typing.Union, type(int | str)) else [kind]
    )


# ---- what callers use --------------------------------------------------------------------------------------


def attributes_of(names: Iterable[str], files: Iterable[Path]) -> dict[str, str]:
    """What is asked of variables (or attributes) with these names: attribute -> where."""
    found: dict[str, str] = {}
    wanted = set(names)
    for file in files:
        for node in nodes_of(file):
            if isinstance(node, ast.Attribute):
                base = node.value
                name = (
                    base.id
                    if isinstance(base, ast.Name)
                    else base.attr
                    if isinstance(base, ast.Attribute)
                    else ""
                )
                if name in wanted:
                    found.setdefault(node.attr, f"{file.name}:{node.lineno}")
    return found
