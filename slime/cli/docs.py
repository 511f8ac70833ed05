"""`slime docs`: write the pages on flags, plug-ins, catalog and metrics from the declarations in slime/."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from slime import arguments
from slime.arguments.all_flags import all_specs
from slime.arguments.core.flag import FlagSpec
from slime.catalog.backends import BACKENDS
from slime.catalog.curricula import CURRICULA
from slime.catalog.datasets import DATASET_FORMATS
from slime.catalog.engines import ENGINES
from slime.catalog.environments import ENVIRONMENTS
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.families import SGLANG_VERSION, family_rows
from slime.catalog.metrics import METRICS
from slime.catalog.optimizers import OPTIMIZERS
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS
from slime.catalog.rewards import REWARDS
from slime.catalog.sandboxes import SANDBOXES
from slime.catalog.tool_formats import TOOL_FORMATS
from slime.catalog.trackers import TRACKERS
from slime.catalog.transports import TRANSPORTS
from slime.catalog.vision import VISION_FAMILIES
from slime.plugins import PLUGIN_POINTS

GENERATED = "<!-- Written by `slime docs`; edit the declarations in slime/, not this page. -->"
SINCE = Path(arguments.__file__).with_name("since.yaml")
WIDTH = 110

CATALOG: dict[str, Mapping[str, Any]] = {
    "`--advantage-estimator`": ESTIMATORS,
    "`--policy-loss-type`": POLICY_LOSSES,
    "`--loss-reduction`": REDUCTIONS,
    "`--optimizer`": OPTIMIZERS,
    "`--rm-type`": REWARDS,
    "`--sandbox`": SANDBOXES,
    "`--prompt-data`": DATASET_FORMATS,
    "`--curriculum`": CURRICULA,
    "`--env`": ENVIRONMENTS,
    "`--rollout-engine`": ENGINES,
    "`--train-backend`": BACKENDS,
    "Models with images": VISION_FAMILIES,
    "Weight transports": TRANSPORTS,
    "Trackers (`--use-NAME`)": TRACKERS,
    "Tool calls of model families (`tool_parser` of agents)": TOOL_FORMATS,
}

# The flags that most runs set, each with an example.
ESSENTIALS = {
    "config": "run.yaml",
    "hf_checkpoint": "Qwen/Qwen3-0.6B",
    "prompt_data": "prompts.jsonl",
    "input_key": "prompt",
    "label_key": "label",
    "apply_chat_template": "",
    "rm_type": "math",
    "custom_rm_path": "reward.py:reward",
    "advantage_estimator": "grpo",
    "num_rollout": "500",
    "rollout_batch_size": "32",
    "n_samples_per_prompt": "8",
    "global_batch_size": "256",
    "rollout_max_response_len": "1024",
    "rollout_temperature": "1.0",
    "lr": "1e-6",
    "max_tokens_per_gpu": "8192",
    "eval_prompt_data": "heldout heldout.jsonl",
    "eval_interval": "20",
    "save": "checkpoints",
    "load": "checkpoints",
    "save_interval": "20",
    "save_hf": "model-{rollout_id}",
    "run_dir": "runs/first",
    "rollout_engine": "sglang",
    "train_backend": "megatron",
    "actor_num_gpus_per_node": "8",
    "rollout_num_gpus": "8",
    "colocate": "",
    "runtime": "ray",
}

# The groups of flags, in the order in which a task needs them.
TASKS = {
    "Prompts and rewards": ("Data", "Images", "Rewards", "Sandbox and judge", "Episodes and environments"),
    "Generating responses": ("Rollout", "Engine", "Topology and routing", "Weight sync"),
    "Learning": (
        *("Algorithm", "Off-policy correction", "Critic", "Kept policies"),
        *("On-policy distillation", "Preference pairs"),
    ),
    "The training step": (
        *("Training", "Optimizer", "Parallelism", "FSDP trainer", "Megatron trainer", "Low-rank adapters"),
        "Profiles of the trainer",
    ),
    "A run, its machines and its files": (
        *("Run", "Cluster", "Checkpoint", "Evaluation", "Logging", "Debug", "Assertions of a run"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slime docs", description=__doc__.partition(":")[2].strip())
    parser.add_argument("folder", nargs="?", type=Path, default="docs", metavar="DIR", help="where to [docs]")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """File name -> content of every generated page."""
    return {
        "flags.md": flags_page(),
        "plugins.md": plugins_page(),
        "catalog.md": catalog_page(),
        "metrics.md": metrics_page(),
        "model_families.md": families_page(),
    }


def flags_page() -> str:
    blocks = [
        "Every flag of `slime train` (and `python train.py`), the essential ones first, then by task. Each "
        "is also a key of a `--config run.yaml`, written with `-` or `_`; the command line wins. Switches "
        "have a `--no-` form. `slime train ... --print-config` shows every value of a run and where it came "
        "from. A dash means that the flag is not set, or that its value is derived. `slime train --help "
        "WORD` prints the flags that mention a word. **Since** is the version in which the flag appeared; "
        "a † marks flags that THUDM/slime has by the same name ([migrating.md](migrating.md)).",
        "## Essentials",
        "The flags that most runs set, each with an example. [scaling.md](scaling.md) has whole commands, "
        "`recipes/` whole files.",
        "| example | meaning |",
        "|---|---|",
    ]
    specs = all_specs()
    for name, value in ESSENTIALS.items():
        blocks.append(_table_row(f"`{f'{specs[name].option} {value}'.strip()}`", _meaning(specs[name])))
    since, groups = flags_since(), dict[str, list[FlagSpec]]()
    for spec in specs.values():
        groups.setdefault(spec.group, []).append(spec)
    for task, names in TASKS.items():
        blocks.append(f"## {task}")
        for group in (group for name in names for group in groups if group.startswith(name)):
            blocks += [f"### {group}", "| flag | default | since | meaning |", "|---|---|---|---|"]
            blocks += [row for spec in groups[group] for row in _flag_rows(spec, since[spec.name])]
    return _page("Flags", blocks)


def flags_since() -> dict[str, str]:
    """Flag -> version in which it appeared, with a † if THUDM/slime has it too."""
    versions: dict[str, list[str]] = yaml.safe_load(SINCE.read_text(encoding="utf-8"))
    also_there = versions.pop("in THUDM/slime")
    return {n: f"{v}†" if n in also_there else v for v, names in versions.items() for n in names}


def _flag_rows(spec: FlagSpec, since: str) -> Iterator[str]:
    """Yield the row of a flag, and one for each of its named numbers."""
    has_default = spec.kind is not bool and spec.default not in (None, [], {})
    switch_default = "on" if spec.default and not spec.info.off else "off"
    default = f"`{spec.default}`" if has_default else switch_default if spec.kind is bool else "-"
    kind = "" if spec.kind is bool else f" {_type_text(spec)}"
    yield _table_row(f"`{spec.option}`{kind}", default, since, _meaning(spec))
    for name, row in (spec.info.rows or {}).items():
        yield _table_row(f"`{spec.option}` {name}", f"`{row.default:g}`", since, _text(row.help))


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plugins_page() -> str:
    blocks = [
        "A plug-in is a function (or class) of yours, named on the command line as "
        "`package.module.function` or `path/to/file.py:function`. All configured ones are loaded before "
        "any process starts, and their parameters are compared with the call below: a misspelt path or a "
        "wrong parameter ends the run at once, with the reason. A function may have further parameters if "
        "they have defaults. Parameters in brackets are passed only if the function has them. `args` is a "
        "copy of all flags and facts of the run (`sglang_router_ip`, `num_rollout`, ...) that you may "
        "change. What plug-ins can import: [api.md](api.md).",
    ]
    for p in PLUGIN_POINTS:
        blocks.append(f"- `{p.option}`, {p.when}: `{p.call}` returns {_text(p.returns)}.")
    return _page("Plug-ins", blocks)


def catalog_page() -> str:
    blocks = [
        "The choices of flags with a fixed list of choices: what each is, where its code is, and its "
        "traits as in the rows of `slime/catalog`, where comments explain them. A trait that is not "
        "listed has its default.",
    ]
    for flag, rows in CATALOG.items():
        blocks.append(f"## {flag}")
        for name, row in rows.items():
            code = getattr(row, fields(row)[0].name)
            home = f"`{code}`" if code.startswith("slime.") else code
            parts = [_text(getattr(row, "help", "")), home, _text(", ".join(_traits(row)))]
            blocks.append(f"- `{name}`: {'; '.join(filter(None, dict.fromkeys(parts)))}")
    return _page("Catalog", blocks)


def metrics_page() -> str:
    blocks = [
        "Every metric that a run logs, to `RUN/metrics.jsonl` (one JSON object per line) and to the "
        "trackers. The normal range is a rule of thumb; [watching.md](watching.md#advice) lists what "
        "slime checks while a run is active. A part in angle brackets stands for several names: `<stat>` "
        "is mean, median, max or min. `slime plot RUN -m 'train/*'` plots any of them.",
    ]
    for group, rows in METRICS.items():
        blocks.append(f"## {group}")
        for row in rows:
            normal = f". *Normal: {_text(row.normal)}.*" if row.normal else ""
            blocks.append(f"- `{row.name}`: {_text(row.what)}{normal}")
    return _page("Metrics", blocks)


def families_page() -> str:
    columns = ("family", "FSDP", "Megatron", "embedded", "SGLang", "images", "seen on")
    text = f"""
Model types of `config.json`, what trains and serves them, and the largest machine on which that was seen. A
dash means no. A run with a model of another family stops at the start: compare the model with `slime
verify-model --hf-checkpoint DIR`, and if all numbers agree, add `--allow-unverified-model`.

**FSDP**: one optimizer step over packed documents agrees with transformers, which gets one document at a
time, within 1e-4 (fp32, CPU), and exported weights agree bit for bit
([verify_model.md](verify_model.md#slime-verify-model)). Families with images: [images.md](images.md).

- *packed*: documents are concatenated without padding; attention is slime's. Sliding windows, chunks, sinks
and soft caps are known.

- *packed, states by document*: the same, except that layers that carry a state (gated delta nets, Mamba,
short convolutions) get documents as rows of a batch. On a GPU they use flash-linear-attention and
causal-conv1d where transformers finds these. No context parallelism.

- *padded*: attention code of the family's own runs on a batch of documents padded on the right: slower. No
context parallelism.

**Megatron**: layouts and differences are in [megatron.md](megatron.md#families). A launch line with flags of
Megatron's and another family starts on FSDP ([migrating.md](migrating.md)).

**embedded**: *tested* families are served by its tests; *untested* ones have attention that it can replace,
so it tries. It refuses layers that carry a state ([engines.md](engines.md)).

**SGLang**: {SGLANG_VERSION} has a model of this architecture; tests served a few of them
([status.md](status.md)).
"""
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    rows = [_table_row(f"`{name}`", *cells) for name, *cells in family_rows()]
    return _page(
        "Model families", [*blocks, _table_row(*columns), _table_row(*["---"] * len(columns)), *rows]
    )


def _page(title: str, blocks: Sequence[str]) -> str:
    """Join blocks to a page: list entries and table rows follow each other, other blocks are separated."""
    text, before = f"{GENERATED}\n# {title}\n", ""
    for block in blocks:
        kind = "row" if block.startswith("|") else "item" if block.lstrip().startswith("- ") else ""
        indent = block[: block.index("- ") + 2].replace("-", " ") if kind == "item" else ""
        whole_words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        wrapped = textwrap.wrap(block, WIDTH, subsequent_indent=indent, **whole_words)
        lines = [block] if kind == "row" else wrapped
        text += ("" if kind and kind == before else "\n") + "\n".join(lines) + "\n"
        before = kind
    return text


def _traits(row: Any) -> Iterator[str]:
    """Yield the fields that differ from their defaults, without the code and the help text."""
    for trait in fields(row)[1:]:
        value = getattr(row, trait.name)
        if is_dataclass(value):
            yield from _traits(value)
        elif trait.repr and trait.name != "help" and value != trait.default:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield trait.name if value is True else f"{trait.name} {text}"


def _type_text(spec: FlagSpec) -> str:
    if spec.info.choices:
        return ", ".join(spec.info.choices)
    if spec.info.rows:
        return "NAME=NUMBER,..."
    name = {bool: "switch", dict: "JSON", int: "int", float: "float", str: "text"}[spec.kind]
    limits = f" {_text(spec.info.limits)}" if spec.info.limits else ""
    return (f"{name} ..." if spec.many else name) + limits


def _meaning(spec: FlagSpec) -> str:
    return _text(spec.info.help + (f" ({spec.info.condition})" if spec.info.condition else ""))


def _text(text: str) -> str:
    return text.replace("<", "&lt;")
