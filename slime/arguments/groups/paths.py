"""Makes paths in settings absolute, because processes of a run may work in another folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import FlagSpec
from slime.arguments.groups.run import split_files
from slime.catalog.datasets import HUB, is_url

# `w/reward.py:reward`, also of an environment that makes prompts: `env:w/maze.py:Maze#train:100`.
_IN_A_FILE = re.compile(r"^((?:env:)?)([^:]+\.py)(:.+)$")
_HUB_FOLDER = re.compile(rf"^({HUB})([^#:@]+)(.*)$")


def absolute_paths(draft: Draft) -> None:
    """Resolve relative paths, after the rules that show them as the user wrote them."""
    for name, spec in draft.specs.items():
        draft.values[name] = _of_flag(spec, draft.values[name])
    values = draft.values
    values["critic_overrides"] = {
        name: _of_flag(draft.specs[name], value) if name in draft.specs else value
        for name, value in draft.critic_overrides.items()
    }
    values["start_from"] = _each(_model, values.get("start_from"))
    for dataset in draft.eval_datasets:
        dataset.path = _source(dataset.path)
        for name in ("custom_rm_path", "custom_generate_function_path"):
            setattr(dataset, name, _each(_plugin, getattr(dataset, name)))
    topology = draft.engine_topology
    models = (replace(model, model_path=_each(_model, model.model_path)) for model in topology.models)
    values["engine_topology"] = replace(topology, models=tuple(models))


def _of_flag(spec: FlagSpec, value: Any) -> Any:
    if spec.name == "prompt_data":
        return _each(_sources, value)
    if spec.name == "eval_prompt_data":  # name, file, name, file, ...
        return value and [_source(word) if at % 2 else word for at, word in enumerate(value)]
    if spec.name in ("env", "env_args"):
        return _each(_plugin, value)
    resolve = _BY_METAVAR.get(spec.metavar or "")
    return _each(resolve, value) if resolve is not None else value


def _each(resolve: Callable[[str], str], value: Any) -> Any:
    """Resolve a path, or every path in a list or an object."""
    if isinstance(value, list):
        return [_each(resolve, item) for item in value]
    if isinstance(value, dict):
        return {key: _each(resolve, item) for key, item in value.items()}
    return resolve(value) if isinstance(value, str) and value else value


def _in_full(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _model(text: str) -> str:
    """Resolve a folder; a hub name is unchanged."""
    return _in_full(text) if Path(text).expanduser().exists() else text


def _plugin(text: str) -> str:
    """Resolve the file of `file.py:function`; `package.module.function` is unchanged."""
    match = _IN_A_FILE.match(text)
    if match is not None:
        return f"{match[1]}{_in_full(match[2])}{match[3]}"
    is_program = os.sep in text and ":" not in text  # an interpreter: .venv-sglang/bin/python
    return _in_full(text) if is_program else text


def _sources(text: str) -> str:
    return ",".join(map(_source, split_files(text)))


def _source(text: str) -> str:
    """Resolve a file of prompts, with its range of rows if it has one; addresses are unchanged."""
    if (hub := _HUB_FOLDER.match(text)) is not None:
        return f"{hub[1]}{_model(hub[2])}{hub[3]}"
    if is_url(text) or text.startswith("env:"):
        return _plugin(text)
    return _in_full(text)


_BY_METAVAR: dict[str, Callable[[str], str]] = {
    "FILE": _in_full,
    "DIR": _in_full,
    "TEMPLATE": _in_full,
    "MODEL": _model,
    "PATH": _plugin,
}
