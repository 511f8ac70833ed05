"""`slime docs`: writes docs/flags.md, plugins.md and catalog.md from the declarations, so that they agree."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from slime.arguments.all_flags import all_specs
from slime.arguments.core.flag import FlagSpec
from slime.catalog.backends import BACKENDS
from slime.catalog.datasets import DATASET_FORMATS
from slime.catalog.engines import ENGINES
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS
from slime.catalog.rewards import REWARDS
from slime.catalog.transports import TRANSPORTS
from slime.plugins import PLUGIN_POINTS

GENERATED = "<!-- Written by `slime docs`; edit the declarations in slime/, not this page. -->"

CATALOG: dict[str, Mapping[str, Any]] = {
    "`--advantage-estimator`": ESTIMATORS,
    "`--policy-loss-type`": POLICY_LOSSES,
    "`--loss-reduction`": REDUCTIONS,
    "`--rm-type`": REWARDS,
    "`--prompt-data`": DATASET_FORMATS,
    "`--rollout-engine`": ENGINES,
    "`--train-backend`": BACKENDS,
    "Weight transports": TRANSPORTS,
}


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
    return {"flags.md": flags_page(), "plugins.md": plugins_page(), "catalog.md": catalog_page()}


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


def catalog_page() -> str:
    lines = [
        GENERATED,
        "# Catalog",
        "",
        "What flags with a closed list of choices can choose: where its code is, and its traits as the rows",
        "of `slime/catalog` have them; comments there say what each means. A trait that is not named has its",
        "default.",
    ]
    for flag, rows in CATALOG.items():
        lines += ["", f"## {flag}", "", "| name | what it is | code | traits |", "|---|---|---|---|"]
        for name, row in rows.items():
            code, what = getattr(row, fields(row)[0].name), getattr(row, "help", "")
            home = f"`{code}`" if code.startswith("slime.") else code
            lines.append(f"| `{name}` | {_cell(what)} | {home} | {_cell('; '.join(_traits(row)))} |")
    return "\n".join(lines) + "\n"


def _traits(row: Any) -> Iterator[str]:
    """Fields that differ from their defaults; the first is the code, and prose is left out."""
    for trait in fields(row)[1:]:
        value = getattr(row, trait.name)
        if is_dataclass(value):
            yield from _traits(value)
        elif trait.repr and trait.name != "help" and value != trait.default:
            text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield trait.name if value is True else f"{trait.name}: {text}"


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
