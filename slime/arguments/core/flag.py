"""Declares one flag: a typed field with its help, its range and the condition for its effect."""

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.catalog.named_numbers import NamedNumber, check_range, read_named_numbers


@dataclass(frozen=True)
class OnlyWith:
    """A condition under which a flag has an effect, made by `needs`, `lacks`, `either` or `both`."""

    words: str  # in the help and in the error, after "only"
    works: Callable[[Any], object]  # checks the draft of the settings
    harmless: bool = False  # without it the flag cannot change what is trained: a warning is enough
    said_by: str | None = None  # harmless if the user gave this flag, and so chose to leave something out

    def is_harmless(self, draft: Any) -> bool:
        return self.harmless or (self.said_by is not None and draft.was_given(self.said_by))


def needs(name: str, *values: str, or_if: Callable[[Any], object] | None = None, **more: Any) -> OnlyWith:
    """Require one of the values, or a value that is not empty; `or_if`: a silent exception."""

    def works(draft: Any) -> object:
        value = getattr(draft, name)
        return (value in values if values else value) or (or_if is not None and or_if(draft))

    return OnlyWith(f"with {option_of(name)} {_alternatives(values)}".rstrip(), works, **more)


def lacks(name: str, *values: str, or_if: Callable[[Any], object] | None = None, **more: Any) -> OnlyWith:
    """Require that a flag is not given, or has none of the values; a default-on switch must stay on."""

    def works(draft: Any) -> object:
        value = getattr(draft, name)
        return not (value in values if values else value) or (or_if is not None and or_if(draft))

    return OnlyWith(f"without {option_of(name)} {_alternatives(values)}".rstrip(), works, **more)


def stays_on(name: str, **more: Any) -> OnlyWith:
    """Require a default-on switch, which `--disable-...` turns off."""
    return OnlyWith(f"without {option_of('disable_' + name)}", lambda draft: getattr(draft, name), **more)


def above(name: str, number: float, **more: Any) -> OnlyWith:
    """Require that a flag has a value above a number."""
    return OnlyWith(f"with {option_of(name)} above {number:g}", lambda d: getattr(d, name) > number, **more)


def either(*conditions: OnlyWith, **more: Any) -> OnlyWith:
    """Require one of several conditions."""
    first, *others = (condition.words for condition in conditions)
    words = _alternatives([first, *(text.removeprefix("with ") for text in others)])
    return OnlyWith(words, lambda draft: any(c.works(draft) for c in conditions), **more)


def both(*conditions: OnlyWith, **more: Any) -> OnlyWith:
    """Require all of several conditions."""
    words = " and ".join(condition.words for condition in conditions)
    return OnlyWith(words, lambda draft: all(c.works(draft) for c in conditions), **more)


def having(rows: Mapping[str, Any], trait: str) -> list[str]:
    """Return the names of the catalog rows that have a trait."""
    return [name for name, row in rows.items() if getattr(row, trait)]


def option_of(name: str) -> str:
    """`use_rs` -> `--use-rs`."""
    return "--" + name.replace("_", "-")


def name_of(option: str) -> str:
    """`--use-rs`, or a key of a file such as `use-rs` -> `use_rs`."""
    return option.removeprefix("--").removeprefix("__").replace("-", "_")


def _alternatives(texts: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


_METAVARS = {"_path": "PATH", "_dir": "DIR", "_key": "KEY"}  # by the suffix of a flag's name


@dataclass(frozen=True)
class FlagInfo:
    """Metadata of a flag besides its name, type and default."""

    help: str
    choices: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    metavar: str | None = None
    off: str | None = None  # turns a default-on switch off: `--disable-rewards-normalization`
    alias: str | None = None
    repeatable: bool = False  # `--hook a --hook b` collects both
    secret: bool = False  # never printed
    rows: Mapping[str, NamedNumber] | None = None  # of an object: the only keys that it may have
    only_with: tuple[OnlyWith, ...] = ()  # all must be true; the first that is not is reported

    @property
    def limits(self) -> str:
        """Return the range as the help shows it: `> 0, <= 1`."""
        bounds = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)

    @property
    def condition(self) -> str:
        """Return the condition for an effect, as the help states it: `only with --use-tis`."""
        return "only " + " and ".join(entry.words for entry in self.only_with) if self.only_with else ""


def flag(default: Any, help: str, *, only_with: OnlyWith | tuple[OnlyWith, ...] = (), **info: Any) -> Any:
    """Declare a flag. The annotation is its type; `None` in it means "not set", which the help explains."""
    conditions = (only_with,) if isinstance(only_with, OnlyWith) else only_with
    metadata = {"flag": FlagInfo(help=help, only_with=conditions, **info)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class FlagSpec:
    """One declared flag, ready for a parser."""

    name: str  # the attribute of args: rollout_batch_size
    group: str
    kind: type  # int, float, str, bool or dict (a JSON object)
    many: bool
    one_or_many: bool  # one value stays a plain value, several become a list
    default: Any
    info: FlagInfo

    @property
    def metavar(self) -> str | None:
        """Return the value's name in the help; it also marks relative paths that are resolved (paths.py)."""
        by_name = next((word for suffix, word in _METAVARS.items() if self.name.endswith(suffix)), None)
        return self.info.metavar or by_name or ("JSON" if self.kind is dict else None)

    @property
    def option(self) -> str:
        """The spelling shown to users: `--rollout-batch-size`, or `--disable-...` of a default-on switch."""
        return self.info.off or option_of(self.name)

    @property
    def on_options(self) -> list[str]:
        """Return the spellings that set the value (or turn a switch on)."""
        return [option_of(self.name), *([self.info.alias] if self.info.alias else [])]

    @property
    def off_options(self) -> list[str]:
        """Return the spellings that turn a switch off, so that a command line can override a file."""
        if self.kind is not bool:
            return []
        if self.info.off:
            return [self.info.off]
        is_negative = self.name.startswith("no_")
        return [option_of(self.name.removeprefix("no_") if is_negative else f"no_{self.name}")]


def specs_of(group_class: type) -> list[FlagSpec]:
    """Return every flag that one group dataclass declares, in the order of declaration."""
    hints = typing.get_type_hints(group_class)
    specs = []
    for declared in dataclasses.fields(group_class):
        kind, many, one_or_many = _read_type(hints[declared.name])
        factory = declared.default_factory
        default = declared.default if factory is dataclasses.MISSING else factory()
        title = (group_class.__doc__ or "").splitlines()[0].rstrip(".")
        specs.append(
            FlagSpec(declared.name, title, kind, many, one_or_many, default, declared.metadata["flag"])
        )
    return specs


def _read_type(hint: Any) -> tuple[type, bool, bool]:
    """`list[str] | None` -> (str, True, False); `str | list[str] | None` -> (str, True, True)."""
    union = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    members = [member for member in union if member is not type(None)]
    lists = [member for member in members if typing.get_origin(member) is list]
    if lists:
        return typing.get_args(lists[0])[0], True, len(members) > 1
    (member,) = members
    return typing.get_origin(member) or member, False, False


def convert(spec: FlagSpec, value: Any) -> Any:
    """Convert a value as written to the flag's type; ValueError gives the reason alone."""
    info = spec.info
    if spec.kind is bool:
        return _to_bool(value)
    if spec.kind is dict:
        return _to_object(value) if info.rows is None else read_named_numbers(value, info.rows)
    if spec.kind is not str:
        return _to_number(spec, value)
    if isinstance(value, (dict, list)):
        raise ValueError(f"expected text, found a {type(value).__name__}")
    text = with_home(str(value))
    if info.choices and text not in info.choices:
        raise ValueError(f"choose from {', '.join(info.choices)}")
    return text


def with_home(text: str) -> str:
    """Expand `~/` or `$NAME/` at the start of a path; no shell does so in a file or in `--run-dir=~/run`."""
    named = re.match(r"\$(?:(\w+)|\{(\w+)\})(?=/|$)", text)
    if named is not None:
        name, rest = named[1] or named[2], text[named.end() :]
        if name not in os.environ and rest:
            raise ValueError(f"the variable {name} is not set in the environment")
        return os.environ.get(name, text) + rest
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def _to_bool(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    found = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError("expected true or false")
    return found


def _to_object(value: Any) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object such as '{\"key\": 1}'")
    return found


def _to_number(spec: FlagSpec, value: Any) -> Any:
    words, info = "a whole number" if spec.kind is int else "a number", spec.info
    try:
        # YAML reads 1e-6 as text; and 8.0 for a count is an error, not 8.
        number: Any = spec.kind(value) if isinstance(value, str) or type(value) is int else value
    except ValueError:
        raise ValueError(f"expected {words}") from None
    has_kind = type(number) is spec.kind
    if not has_kind:
        raise ValueError(f"expected {words}")
    check_range(number, ge=info.ge, gt=info.gt, le=info.le, lt=info.lt)
    return number
