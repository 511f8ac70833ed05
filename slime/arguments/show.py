"""Formats settings as text: the help page and the listing of --print-config."""

import argparse
import shutil
import textwrap
from collections.abc import Sequence

from slime.arguments.all_flags import all_specs
from slime.arguments.args import Args
from slime.arguments.core.flag import FlagSpec

COLUMN = 38
_INTRODUCTION = """\
Train a language model by reinforcement learning. A flag is also a key of the --config file; the command line
wins. Switches have a --no- form. --print-config shows every value and where it came from; --help WORD
shows the flags that mention it."""


def render_help(prog: str, custom: Sequence[argparse.Action] = (), words: Sequence[str] = ()) -> str:
    """Return the help page, grouped by subject. `words`: show only flags that mention all of them."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 119)
    lines = [f"usage: {prog} [--config run.yaml] [flags]", "", _INTRODUCTION]
    group = None
    for spec in all_specs().values():
        text = f"{spec.name} {spec.option} {spec.group} {spec.info.help}".lower()
        if not all(word.lower() in text for word in words):
            continue
        if spec.group != group:
            group = spec.group
            lines += ["", f"{group}:"]
        lines += _entry(f"{spec.option}{_value_name(spec)}", spec.info.help + _notes(spec), width)
        for name, row in (spec.info.rows or {}).items():
            lines += _entry(f"    {name}", f"{row.help} [{row.default:g}]", width)
    if group is None:
        lines += ["", f"No flag mentions {' and '.join(words)}. --help alone lists all."]
    if custom and not words:
        lines += ["", "Your own flags:"]
        lines += [line for a in custom for line in _entry(", ".join(a.option_strings), a.help or "", width)]
    return "\n".join(lines) + "\n"


def _entry(left: str, help: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(help, max(width - COLUMN, 20), break_on_hyphens=False) or [""]
    head = f"  {left}"
    # Many choices make one long word, which can only be broken at its commas.
    heads = (
        textwrap.wrap(head.replace(",", ", "), width, subsequent_indent=" " * 6)
        if len(head) > width
        else [head]
    )
    first = [f"{head:<{COLUMN}}{wrapped[0]}"] if len(head) < COLUMN else [*heads, " " * COLUMN + wrapped[0]]
    return first + [" " * COLUMN + line for line in wrapped[1:]]


def _value_name(spec: FlagSpec) -> str:
    if spec.kind is bool:
        return ""
    name = spec.metavar or {int: "N", float: "X"}.get(spec.kind, "VALUE")
    if spec.info.choices:
        name = "{" + ",".join(spec.info.choices) + "}"
    return f" {name}" + (" ..." if spec.many else "")


def _notes(spec: FlagSpec) -> str:
    """` (only with --use-rs) [2.0; > 0]`: when the flag has an effect, its default and its range."""
    default = str(spec.default) if spec.kind is not bool and spec.default not in (None, [], {}) else ""
    numbers = "; ".join(filter(None, [default, spec.info.limits]))
    condition = f" ({spec.info.condition})" if spec.info.condition else ""
    return condition + (f" [{numbers}]" if numbers else "")


def render_config(args: Args) -> str:
    """Return every value and its source as columns, grouped as in the help; secrets are masked."""
    specs, sources, values = all_specs(), args.sources, args.to_dict(hide_secrets=True)
    names = [*specs, *(name for name in values if name not in specs)]
    name_width = max(map(len, names))
    value_width = min(max(len(str(value)) for value in values.values()), 48)
    lines, group = [], ""
    for name in names:
        before, group = group, specs[name].group if name in specs else "Other values"
        if group != before:
            lines += ["", f"# {group}"]
        source = sources.get(name, "derived")
        lines.append(f"{name:<{name_width}}  {values[name]!s:<{value_width}}  {source}")
    return "\n".join(lines).lstrip("\n")
