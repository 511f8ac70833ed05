"""Trainer checkpoints by torch.distributed.checkpoint: exact resume, also on another number of ranks.

A folder holds the sharded weights and optimizer moments, `trainer.json` (format version, architecture
fingerprint, schedule position) and `rng_<rank>.pt`. The caller makes the folder appear atomically.
"""

import datetime
import hashlib
import json
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from slime.backends.fsdp import loading
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.lora import hub_name, is_adapter
from slime.backends.shared.checkpoint_errors import plain_errors, unreadable_named
from slime.backends.shared.hub_folder import listed
from slime.backends.shared.placed_adam import PlacedAdamW, create_state
from slime.catalog.deadlines import timeout_s
from slime.utils.files.torch_dist_folder import is_torch_dist

Trainer = Any  # an `FSDPBackend`, whose module imports this one


def fingerprint(lm: HFModel, *, adapters: bool = True) -> dict[str, Any]:
    """Return all that must agree for weights to be exchangeable: model type, parameter names and shapes."""
    parameters = [(name, p) for name, p in lm.named_parameters() if adapters or not is_adapter(name)]
    shapes = {name if adapters else hub_name(name): list(parameter.shape) for name, parameter in parameters}
    text = json.dumps([lm.config.model_type, shapes], sort_keys=True)
    return {
        "model_type": lm.config.model_type,
        "shapes": shapes,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def save(backend: Trainer, path: Path, *, with_optimizer: bool) -> None:
    create_state(backend.optimizer)
    with _plain_moments(backend.optimizer):
        _write(backend, path, _state(backend, with_optimizer))


def _write(backend: Trainer, path: Path, state: dict[str, Any]) -> None:
    if not backend.args.async_save:
        with plain_errors():
            dcp.save(state, checkpoint_id=path)
        return
    if backend.save_group is None:
        # A separate group: messages of the background save must not mix with those of training.
        patience = datetime.timedelta(seconds=timeout_s(backend.args, "collective"))
        backend.save_group = dist.new_group(backend="gloo", timeout=patience)
    # Tensors already in host memory would otherwise be written with later values.
    copied = {
        name: value.detach().clone() if value.device.type == "cpu" else value for name, value in state.items()
    }
    pending = dcp.async_save(copied, checkpoint_id=path, process_group=backend.save_group)
    assert isinstance(pending, Future), "torch returns more only on request"
    backend.pending_save = pending


def load(backend: Trainer, path: Path, *, with_optimizer: bool) -> None:
    """Load weights and, with the optimizer, moments into the live tensors."""
    if with_optimizer:
        create_state(backend.optimizer)
    with _plain_moments(backend.optimizer), unreadable_named(path):
        dcp.load(_state(backend, with_optimizer), checkpoint_id=path)


def check_same_model(saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Raise one ValueError that names what differs."""
    if saved["digest"] == own["digest"]:
        return
    differences = []
    if saved["model_type"] != own["model_type"]:
        differences.append(f"model type {saved['model_type']} instead of {own['model_type']}")
    for name in sorted(saved["shapes"].keys() | own["shapes"].keys()):
        there, here = saved["shapes"].get(name), own["shapes"].get(name)
        if there != here:
            differences.append(f"{name} is {there or 'absent'} in it and {here or 'absent'} here")
    raise ValueError(
        f"checkpoint {path} is of another model than --hf-checkpoint: {listed(differences)}. "
        "Use the checkpoint of this model, or the --hf-checkpoint that it was trained from."
    )


def save_weights(backend: Trainer, path: Path) -> None:
    """Save only the weights that the live model holds now."""
    with plain_errors():
        dcp.save(_state(backend, with_optimizer=False), checkpoint_id=path)


def _state(backend: Trainer, with_optimizer: bool) -> dict[str, Any]:
    """Live tensors by name; reading a checkpoint writes into them in place."""
    # With adapters the model itself is that of --hf-checkpoint, and stays there.
    trained_only = bool(backend.args.lora_rank)
    parameters = backend.model.lm.named_parameters()
    names = {parameter: name for name, parameter in parameters if parameter.requires_grad or not trained_only}
    state: dict[str, Any] = {f"model.{name}": parameter.data for parameter, name in names.items()}
    if with_optimizer:
        for parameter, name in names.items():
            for key, value in backend.optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = _sharded_as(parameter, value)
    return state


def _plain_moments(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Return moments in float32, in whatever format this run keeps them: checkpoints do not depend on it."""
    return optimizer.plain_state() if isinstance(optimizer, PlacedAdamW) else nullcontext()


def _sharded_as(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return a moment of this rank as the shard of a whole tensor, in the same memory."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    return DTensor(value, parameter._spec, requires_grad=False)


def load_hf_weights(lm: HFModel, path: str | Path) -> None:
    """Read the weights of the HF folder `path` into a sharded model; another architecture is a ValueError.

    A torch_dist folder has no config: its tensors are compared with those of the model when they are read.
    """
    if not is_torch_dist(path):
        check_same_model(fingerprint(loading.empty_model(path)), fingerprint(lm, adapters=False), Path(path))
    loading.fill(lm, path)
