"""`slime docs`: writes docs/flags.md and docs/plugins.md from the declarations, so that they always agree."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime.arguments.all_flags import all_specs
from slime.arguments.core.flag import FlagSpec
from slime.plugins import PLUGIN_POINTS

GENERATED = "<!-- Written by `slime docs`; edit the declarations in slime/, not this page. -->"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slime docs", description=__doc__.partition(":")[2].strip())
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("docs"), metavar="DIR", help="where to [docs]"
    )
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """File name -> content of every generated page."""
    return {"flags.md": flags_page(), "plugins.md": plugins_page()}


def flags_page() -> str:
    lines = [
        GENERATED,
        "# Flags",
        "",
        "Every flag of `slime train` (and `python train.py`). Each is also a key of a `--config run.yaml`, "
        "written with `-` or",
        "`_`; the command line wins. Switches have a `--no-` form. `slime train ... --print-config` shows "
        "every value of a run",
        "and where it came from. An empty default means that the flag is not set, or that its value is "
        "derived.",
    ]
    group = None
    for spec in all_specs().values():
        if spec.group != group:
            group = spec.group
            lines += ["", f"## {group}", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        meaning = spec.info.help + (f" ({spec.info.condition})" if spec.info.condition else "")
        lines.append(f"| `{spec.option}` | {_type_text(spec)} | {_default_text(spec)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def plugins_page() -> str:
    lines = [
        GENERATED,
        "# Plug-ins",
        "",
        "A plug-in is a function (or class) of yours, named on the command line as "
        "`package.module.function` or",
        "`path/to/file.py:function`. All configured ones are loaded before any process starts, and their "
        "parameters are",
        "compared with the call below: a misspelt path or a wrong parameter ends the run at once, with the "
        "reason. A function",
        "may have further parameters if they have defaults. Parameters in brackets are passed only if the "
        "function has them.",
        "`args` is a copy of all flags with facts of the run (`sglang_router_ip`, `num_rollout`, ...), "
        "yours to change.",
        "",
        "| flag | called as | returns | when |",
        "|---|---|---|---|",
    ]
    for p in PLUGIN_POINTS:
        lines.append(f"| `{p.option}` | `{p.call}` | {_cell(p.returns)} | {_cell(p.when)} |")
    return "\n".join(lines) + "\n"


def _type_text(spec: FlagSpec) -> str:
    if spec.info.choices:
        return ", ".join(spec.info.choices)
    name = {bool: "switch", dict: "JSON", int: "int", float: "float", str: "text"}[spec.kind]
    return (f"{name} ..." if spec.many else name) + (
        f" {_cell(spec.info.limits)}" if spec.info.limits else ""
    )


def _default_text(spec: FlagSpec) -> str:
    if spec.kind is bool or spec.default in (None, [], {}):
        return ""
    return f"`{spec.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
