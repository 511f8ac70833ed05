"""Checks the sources and targets of models: Megatron checkpoints, engines that serve them, the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.backends.families import COMPUTED_AS, register_configs
from slime.backends.torch_dist.pieces import UnknownLayout, stored_tensors, why_incomplete
from slime.backends.torch_dist.reading import TorchDistFolder
from slime.catalog.engines import ENGINES
from slime.preflight.findings import Finding, error_of
from slime.utils.files.torch_dist_folder import is_release, is_torch_dist
from slime.utils.models.model_config import read_config
from slime.utils.models.model_files import why_no_upload


def check_megatron_folders(args: Args) -> Iterator[Finding]:
    """Compare the list of tensors of each such checkpoint with the model's family and with its files."""
    given = {"--load": args.start_from, "--ref-load": args.ref_load, "--critic-load": args.critic_load}
    given |= {"--opd-teacher-load": args.opd_teacher_load}
    flags: dict[str, str] = {}
    for flag, folder in given.items():
        if folder is not None and is_torch_dist(folder):
            flags[folder] = flag  # the last flag that names it: --load stands for --ref-load, too
    config = _config(args.hf_checkpoint) if flags else None
    for folder, flag in flags.items():
        try:
            why = why_incomplete(Path(folder).expanduser(), stored_tensors(Path(folder).expanduser()))
            if why is not None:
                yield Finding("error", flag, f"{folder}: {why}; copy it again, or convert it again.")
            elif config is not None:
                TorchDistFolder(folder, config)
        except UnknownLayout as error:
            instead = f": the weights of {args.hf_checkpoint} are used instead"
            released = is_release(folder)
            text = f"{folder} cannot be read ({error}){instead if released else ''}."
            yield Finding("warning" if released else "error", flag, text)
        except ValueError as error:
            yield error_of(flag, error)


def check_served(args: Args) -> Iterator[Finding]:
    """Check that the embedded engine supports the model's layers: it computes attention only."""
    if args.debug_train_only or args.rollout_external_engine_addrs:
        return
    kind = ENGINES[args.rollout_engine]
    if kind.own_python:
        return  # its own version of transformers decides at its start
    for model in args.engine_topology.models:
        config = _config(model.model_path) if model.num_engines else None
        why = kind.rules.why_unserved(config) if config is not None else None
        if config is not None and config.model_type in COMPUTED_AS:
            why = f"transformers has no model of type {config.model_type}; use --rollout-engine sglang"
        if why is not None:
            yield Finding("error", "--rollout-engine", f"{model.model_path}: {why}.")


def check_hub_login(args: Args) -> Iterator[Finding]:
    """Check that a run that uploads models is logged in; nothing is checked offline."""
    if args.push_to_hub is not None and (found := why_no_upload()) is not None:
        sure, why = found
        yield Finding("error" if sure else "warning", "--push-to-hub", why)


def _config(model: str | None) -> Any:
    """Return the config of a local model folder; None if transformers cannot read it (reported elsewhere)."""
    if model is None or not read_config(model):
        return None
    from transformers import AutoConfig

    register_configs()
    try:
        return AutoConfig.from_pretrained(model).get_text_config()
    except (ValueError, KeyError, OSError):
        return None
