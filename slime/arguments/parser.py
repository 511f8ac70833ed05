"""Parses the command line: flags from their declarations, values from arguments and files."""

import argparse
import functools
import logging
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from slime.arguments.all_flags import all_specs
from slime.arguments.args import Args
from slime.arguments.core.draft import COMMAND_LINE, DEFAULT, SYNCHRONOUS, Draft, Refusals, Refused
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import FlagSpec, convert, name_of, option_of
from slime.arguments.core.unbuilt import (
    PLUGIN_FLAGS,
    SYNONYMS,
    is_neutral,
    is_unbuilt,
    renamed,
    renamed_key,
    why_idle,
    why_unbuilt,
)
from slime.arguments.groups.roles import apply_critic, read_roles, without_idle
from slime.arguments.passthrough.megatron_flags import (
    NEEDS_MEGATRON,
    is_megatron_flag,
    megatron_fields,
    read_megatron_flags,
    why_missing,
)
from slime.arguments.passthrough.program import split_flags, yaml_flag
from slime.arguments.passthrough.router_flags import PREFIX as ROUTER_PREFIX
from slime.arguments.passthrough.sglang_flags import PREFIX, need_python, server_flags
from slime.arguments.rules import apply_rules
from slime.arguments.show import render_config, render_help
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.utils.machine.own_command import as_typed

logger = logging.getLogger(__name__)

_OWN_SGLANG_OPTIONS = [spec.option for spec in all_specs().values() if spec.option.startswith(PREFIX)]

Preset = Callable[[Draft], Mapping[str, Any]]  # values from the user -> values for other flags
AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    add_custom_arguments: AddArguments | None = None,
    training_loop: str = SYNCHRONOUS,
    preset: Preset | None = None,
) -> Args:
    """Return the settings of a run from its command line (and the files it names), checked and complete.

    Raises ValueError for anything a user can get wrong. `--help` and `--print-config` print and exit with 0.
    `add_custom_arguments(parser)` may add flags of its own with `parser.add_argument`. `training_loop` is the
    loop that will run: some defaults depend on it. `preset` gives values that replace defaults.
    """
    refusals = Refusals()
    parser, custom = build_parser(add_custom_arguments)
    draft = _read_all(parser, custom, sys.argv[1:] if argv is None else list(argv), training_loop, refusals)
    if preset is not None:
        with refusals.collect("Command line"):
            draft.preset(preset(draft))
        refusals.raise_all()
    apply_rules(draft, refusals)
    try:
        refusals.raise_all()
    except ValueError as error:
        for warning in draft.warnings:
            error.add_note(warning)
        raise
    args = Args.of(draft)
    if args.warnings:
        logger.warning("about these settings:\n%s", "\n".join(f"  {w}" for w in args.warnings))
    if args.print_config:
        print(render_config(args))
        raise SystemExit(0)
    return args


def _read_all(
    parser: argparse.ArgumentParser,
    custom: dict[str, "CustomFlag"],
    words: list[str],
    training_loop: str,
    refusals: Refusals,
) -> Draft:
    """Read the values that the user gave, on the command line and in files; all mistakes are one error."""
    ours = set(known_options(parser))
    words, others = split_flags(renamed(words), lambda option: None if option in ours else _owner(option))
    for option, values in others["unbuilt"].items():
        if not is_neutral(option, values):
            refusals.add("Command line", why_unbuilt(option))
    given = {}
    with refusals.collect("Command line"):
        given = _parse_command_line(parser, words, refusals)
    draft = Draft(all_specs(), training_loop=training_loop)
    for name, value in (("megatron_config", {}), ("critic_overrides", {}), ("sglang_options", [])):
        draft.set(name, value, DEFAULT)
    for name, flag in custom.items():
        draft.set(name, flag.default, DEFAULT)
    for option, values in others["plug-in"].items():
        draft.set(name_of(option), values[0] if values else True, COMMAND_LINE)
    if given.get("config"):
        with refusals.collect("--config"):
            content = read_yaml_mapping(given["config"], "--config")
            in_file = _read_settings(draft, content, given["config"], custom, refusals)
            for owner, flags in in_file.items():
                others[owner] = flags | others[owner]
    for name, value in given.items():
        if name in all_specs() and all_specs()[name].info.rows is not None:
            value = functools.reduce(operator.or_, value, draft.values[name])  # first files, then arguments
        draft.set(name, value, COMMAND_LINE)
    if draft.custom_config_path:
        with refusals.collect("--custom-config-path"):
            _apply_custom_config(draft, draft.custom_config_path)
    if draft.megatron_config_path:
        with refusals.collect("--megatron-config-path"):
            _apply_roles(draft, draft.megatron_config_path, custom, others)
    for name, flag in custom.items():
        if flag.required and not draft.was_given(name):
            refusals.add("Command line", f"{flag.action.option_strings[0]} is required.")
    draft.set("router_options", others["router"], DEFAULT)  # the rules turn them into one list of arguments
    draft.idle += [f"{option} is set, but {why_idle(option)}." for option in others["idle"]]
    with refusals.collect("Flags of SGLang"):
        _apply_server_flags(draft, others["sglang"])
    with refusals.collect("Flags of Megatron"):
        _apply_megatron_flags(draft, others["megatron"])
    refusals.raise_all()  # rules would break on values that could not be read
    return draft


def _owner(option: str) -> str | None:
    """Return whose flag an undeclared option is; None: it is unknown."""
    name = option.removeprefix("--")
    if why_idle(option) is not None:
        return "idle"
    if is_unbuilt(name):
        return "unbuilt"
    if name in PLUGIN_FLAGS:
        return "plug-in"
    if option.startswith((PREFIX, ROUTER_PREFIX)):
        return "sglang" if option.startswith(PREFIX) else "router"
    return "megatron" if is_megatron_flag(option) else None


@dataclass(frozen=True)
class CustomFlag:
    """A flag that a user's function added; argparse, --config and --print-config support it."""

    action: argparse.Action
    default: Any
    required: bool

    def read(self, value: Any) -> Any:
        """Return a value from a file, or a default; text is converted by the flag's type, as in argparse."""
        reader = self.action.type
        return reader(value) if isinstance(value, str) and callable(reader) else value


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError, so that one place formats errors for users."""

    def error(self, message: str) -> NoReturn:
        no_value = r"^argument (--[\w-]+)[^:]*: ignored explicit argument"
        message = re.sub(no_value, r"\1 is a switch and takes no value:", message)
        raise ValueError(message.removeprefix("argument "))

    def format_help(self, words: Sequence[str] = ()) -> str:
        custom = [a for a in self._actions if a.dest != "help" and a.dest not in all_specs()]
        return render_help(self.prog, custom, words)


class _Help(argparse._HelpAction):
    """Prints the help; `--help reward clip` prints only the flags that mention these words."""

    def __call__(self, parser: Any, namespace: object, words: Any, option_string: str | None = None) -> None:
        print(parser.format_help(words), end="")
        parser.exit()


@functools.cache
def build_parser(
    add_custom_arguments: AddArguments | None = None,
) -> tuple[argparse.ArgumentParser, dict[str, CustomFlag]]:
    """Build the parser of all flags; also return the flags that a user's function added, by name."""
    parser: argparse.ArgumentParser = _Parser(
        prog="slime train", allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=False
    )
    parser.add_argument("-h", "--help", action=_Help).nargs = "*"
    for spec in all_specs().values():
        _add_flag(parser, spec)
    declared = set(parser._actions)
    if add_custom_arguments is not None:
        try:
            parser = add_custom_arguments(parser) or parser
        except argparse.ArgumentError as error:
            raise ValueError(f"add_custom_arguments adds a flag that slime already has: {error}") from None
    custom = {}
    for action in parser._actions:
        if action not in declared and not isinstance(action, argparse._HelpAction):
            custom[action.dest] = _leave_only_reading(action)
    return parser, custom


def _leave_only_reading(action: argparse.Action) -> CustomFlag:
    """Let argparse only read values: defaults and required flags are decided after files are read."""
    flag = CustomFlag(action, None, action.required)
    default = None if action.default is argparse.SUPPRESS else flag.read(action.default)
    action.required, action.default = False, argparse.SUPPRESS
    return replace(flag, default=default)


def _add_flag(parser: argparse.ArgumentParser, spec: FlagSpec) -> None:
    if spec.kind is bool:
        parser.add_argument(*spec.on_options, dest=spec.name, action="store_const", const=True)
        parser.add_argument(*spec.off_options, dest=spec.name, action="store_const", const=False)
        return
    options: dict[str, Any] = {"dest": spec.name, "type": functools.partial(_read_word, spec)}
    if spec.many:
        options["nargs"] = "+"
    if spec.info.repeatable:
        options["action"] = "extend"
    if spec.info.rows is not None:
        options["action"] = "append"
    parser.add_argument(*spec.on_options, **options)


def _read_word(spec: FlagSpec, word: str) -> Any:
    """Return the value of a word, or the mistake in it, which is reported with all others."""
    try:
        return convert(spec, word)
    except ValueError as error:
        return ValueError(f"{spec.option} is {word!r}: {error}")


def _parse_command_line(
    parser: argparse.ArgumentParser, argv: list[str], refusals: Refusals
) -> dict[str, Any]:
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    for name, value in list(given.items()):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ValueError):
                refusals.add("Command line", str(one))
                given.pop(name, None)
    settings = next((word for word in unknown if re.search(r"(?i)^[^-].*\.(ya?ml|json)$", word)), None)
    if settings is not None and "config" not in namespace:
        raise ValueError(f"unexpected {settings!r}: a file of settings is given by --config {settings}")
    if unknown:
        for reason in _explain_unknown(unknown, argv, [*known_options(parser), *megatron_fields()]):
            refusals.add("Command line", reason)
    for name, spec in all_specs().items():
        if spec.one_or_many and name in given and isinstance(given[name], list) and len(given[name]) == 1:
            given[name] = given[name][0]
    return given


def known_options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _explain_unknown(words: list[str], argv: list[str], options: list[str]) -> list[str]:
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    if flags:
        return [_explain_unknown_flag(flag, options) for flag in flags]
    at = max(place for place, word in enumerate(argv) if word == words[0])
    if at and argv[at - 1] in options:
        return [f"unexpected {words[0]!r} after {argv[at - 1]}, which takes no value."]
    if at > 1 and argv[at - 2] in options:
        return [f"unexpected {words[0]!r} after {argv[at - 2]} {argv[at - 1]}: that flag takes one value."]
    return [f"unexpected {words[0]!r}: every setting is a flag that starts with --."]


def _explain_unknown_flag(flag: str, options: list[str]) -> str:
    """Explain an unknown flag; a hint names a close match or the name of another framework's flag."""
    name = flag.replace("_", "-").removeprefix("--")
    if name in SYNONYMS:
        return f"unknown flag {flag}; it is called --{SYNONYMS[name]} here."
    near = get_close_matches("--" + name, options, n=1, cutoff=0.85)
    hint = f"did you mean {near[0]}?" if near else f"`{as_typed('train', '--help')}` lists all flags."
    install = "" if near or megatron_fields() else f" ({NEEDS_MEGATRON})"
    return f"unknown flag {flag}; {hint}{install}"


def _apply_server_flags(draft: Draft, found: dict[str, list[str]]) -> None:
    """Apply flags of SGLang itself; giving one selects SGLang unless another engine is named."""
    for option in found:
        near = get_close_matches(option.replace("_", "-"), _OWN_SGLANG_OPTIONS, n=1, cutoff=0.9)
        if near:
            raise ValueError(_explain_unknown_flag(option, near))
    first = next(iter(found), None)
    if first is None:
        return
    engine = draft.rollout_engine
    if engine in ENGINES and not ENGINES[engine].takes_sglang_flags:
        raise ValueError(f"{first} is set, but --rollout-engine {engine} starts no SGLang; remove one.")
    values, words, notes = server_flags(need_python(draft.sglang_python, first)).read(found)
    draft.warnings += notes
    for name, value in values.items():
        draft.set(f"sglang_{name}", value, COMMAND_LINE)
    draft.set("sglang_options", words, COMMAND_LINE)


def _apply_megatron_flags(draft: Draft, found: dict[str, list[str]]) -> None:
    """Apply fields of Megatron's configuration."""
    if not found:
        return
    if draft.was_given("train_backend") and not BACKENDS[draft.train_backend].takes_megatron_flags:
        backend = f"--train-backend is {draft.train_backend}; use --train-backend megatron."
        raise Refused([f"{option} is a flag of Megatron's, but {backend}" for option in found])
    if not megatron_fields():
        raise ValueError(why_missing(list(found)))
    draft.set("megatron_config", draft.megatron_config | read_megatron_flags(found), COMMAND_LINE)


def _read_settings(
    draft: Draft, content: dict[str, Any], path: str, custom: dict[str, CustomFlag], refusals: Refusals
) -> dict[str, dict[str, list[str]]]:
    """Set the values of a file; return the flags of other programs in it, by owner, as arguments."""
    others: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for key, value in content.items():
        for name, new in renamed_key(name_of(str(key)), value).items():
            option = option_of(name)
            owner = None if name in all_specs() or name in custom else _owner(option)
            if owner in ("idle", "sglang", "router", "megatron"):
                others[owner] |= yaml_flag(option, new, negates=owner == "megatron")
                continue
            with refusals.collect("--config"):
                _apply_key(draft, str(key), name, new, path, custom)
    return others


def _apply_roles(
    draft: Draft, path: str, custom: dict[str, CustomFlag], others: dict[str, dict[str, list[str]]]
) -> None:
    roles = read_roles(path)
    critic, refusals = Draft(all_specs()), Refusals()
    critic.set("megatron_config", {}, DEFAULT)
    for role, target in (("actor", draft), ("critic", critic)):
        settings = without_idle(roles.get(role, {}), draft, path)
        found = _read_settings(target, settings, path, custom, refusals)
        if role == "critic":
            _apply_megatron_flags(critic, found.pop("megatron", {}))
        for owner, flags in found.items():
            others[owner] |= flags
    refusals.raise_all()
    if "critic" in roles:
        apply_critic(draft, critic, path)


def _apply_key(
    draft: Draft, key: str, name: str, value: Any, path: str, custom: dict[str, CustomFlag]
) -> None:
    """Apply one key of --config; ValueError explains what is wrong with it."""
    if name in custom:
        draft.set(name, custom[name].read(value), f"file {path}")
        return
    spec, inverted = _find_key(key, name, path, is_heading=isinstance(value, dict))
    if value is not None:
        value = read_file_value(spec, value, f"{key} in {path}")
        if spec.info.rows is not None:
            value = draft.values[spec.name] | value
        draft.set(spec.name, not value if inverted else value, f"file {path}")


def _find_key(key: str, name: str, path: str, *, is_heading: bool) -> tuple[FlagSpec, bool]:
    """Return the flag that a key of a file means, and whether it is the `disable-...` spelling of it."""
    if name in ("config", "print_config"):
        raise ValueError(f"{path}: {key} can only be given on the command line.")
    spellings: dict[str, tuple[FlagSpec, bool]] = {}
    for spec in all_specs().values():
        spellings |= {name_of(option): (spec, True) for option in spec.off_options}
        spellings |= {name_of(option): (spec, False) for option in spec.on_options}
    if name in spellings:
        return spellings[name]
    if is_unbuilt(option_of(name).removeprefix("--")):
        raise ValueError(f"{path}: {why_unbuilt(key)}")
    if is_heading:
        raise ValueError(f"{path}: {key!r} contains other keys; write those at the left margin, without it.")
    if known := SYNONYMS.get(name.replace("_", "-")):
        raise ValueError(f"{path}: unknown key {key!r}; it is called {known!r} here.")
    near = get_close_matches(name, spellings, n=1)
    raise ValueError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "."))


def read_file_value(spec: FlagSpec, value: Any, where: str) -> Any:
    """Convert a value of a YAML file to the flag's type."""
    try:
        if isinstance(value, list) and not spec.many:
            raise ValueError("expected one value, found a list")
        if spec.many and not spec.one_or_many and not isinstance(value, list):
            value = [value]
        return [convert(spec, item) for item in value] if isinstance(value, list) else convert(spec, value)
    except ValueError as error:
        raise ValueError(f"{where} is {value!r}: {error}") from None


def _apply_custom_config(draft: Draft, path: str) -> None:
    """Apply the file before the rules, so that all of them see it. Unknown keys belong to plug-ins."""
    for key, value in read_yaml_mapping(path, "--custom-config-path").items():
        name = str(key).replace("-", "_")
        if hasattr(Args, name) and name not in all_specs():
            raise ValueError(f"{path}: {key!r} is a name that args uses itself; choose another.")
        if name in all_specs() and value is not None:
            value = read_file_value(all_specs()[name], value, f"{key} in {path}")
        if name in draft and draft.sources[name] == COMMAND_LINE and draft.values[name] != value:
            raise ValueError(f"{path}: {key} differs from the command line; keep one of them.")
        draft.set(name, value, f"file {path}")
