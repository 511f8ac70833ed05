"""Trainer checkpoints in megatron-core's distributed format (torch_dist): resume under any other layout.

A folder holds `dist/` (weights and, with --optimizer adam, moments), `trainer.json` (format version,
architecture, schedule position) and `rng_<rank>.pt`. The caller makes the folder appear atomically.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from slime.backends.megatron.fixes import checkpoint_fixes, optimizer_fixes
from slime.backends.megatron.optimizer import reload_copies
from slime.backends.shared.checkpoint_errors import plain_errors, unreadable_named
from slime.backends.shared.trainer_folder import read_manifest

BACKEND = "megatron"
# Moments are written whole per parameter, so that any other layout can read them; the default kind cannot be
# written. Each layer has tensors of its own: stacked over layers they could not be written where some layers
# are frozen and have no moments. Megatron is given copies of this dict, as it adds process groups to it.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
_ARCHITECTURE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("ffn_hidden_size", "num_moe_experts", "mtp_num_layers"),
)


Trainer = Any  # a `MegatronBackend`, whose module imports this one


def fingerprint(backend: Trainer) -> dict[str, Any]:
    """The sizes that must agree before weights of one model fit another."""
    sizes = {name: getattr(backend.config, name) for name in _ARCHITECTURE}
    # None: the checkpoint holds the model itself.
    rank, layers = backend.args.lora_rank, backend.args.lora_target_modules
    sizes |= {"lora_rank": rank or None, "lora_target_modules": layers if rank else None}
    return {"model_type": backend.hf_config.model_type, "vocab_size": backend.hf_config.vocab_size, **sizes}


def _differences(theirs: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Describe where two fingerprints differ."""
    differing = [name for name in own if theirs.get(name) != own[name]]
    return [f"{name} is {theirs.get(name)} in it and {own[name]} here" for name in differing]


def manifest(backend: Trainer) -> dict[str, Any]:
    """Return the manifest of a checkpoint: facts of the model and of its optimizer."""
    return {
        "backend": BACKEND,
        "model": fingerprint(backend),
        "distributed_optimizer": backend.optimizer_config.use_distributed_optimizer,
        "adam_step": optimizer_fixes.adam_step(backend.optimizer),
    }


def save(backend: Trainer, path: Path, *, with_optimizer: bool) -> None:
    # Megatron refuses a folder that is not empty.
    path.mkdir(parents=True, exist_ok=True)
    state = _model_state(backend, METADATA)
    checkpoint_fixes.own_results_server()
    background = backend.args.async_save
    with optimizer_fixes.plain_moments(backend.optimizer, wanted=with_optimizer):
        if with_optimizer:
            state["optimizer"] = backend.optimizer.sharded_state_dict(state, metadata=dict(METADATA))
        with plain_errors():
            request = dist_checkpointing.save(
                state, str(path), content_metadata=dict(METADATA), async_sharded_save=background
            )
        if background:
            backend.saves.schedule_async_request(request)


def load(backend: Trainer, path: Path, written: dict[str, Any], *, with_optimizer: bool) -> None:
    """Read a checkpoint with the manifest `written` into the live model and its optimizer."""
    with_optimizer = with_optimizer and backend.args.optimizer == "adam"
    sharded = written["distributed_optimizer"]
    if with_optimizer and sharded != backend.optimizer_config.use_distributed_optimizer:
        raise ValueError(
            f"checkpoint {path.parent} was saved {'with' if sharded else 'without'} "
            "--use-distributed-optimizer: resume in the same way, or load it with --finetune (weights only)."
        )
    read(backend, path, adam_step=written["adam_step"] if with_optimizer else None)
    if not with_optimizer:
        reload_copies(backend.optimizer)


def read(backend: Trainer, path: Path, adam_step: int | None = None) -> None:
    """Read weights into the live model and, given Adam's step, its moments."""
    with_optimizer = adam_step is not None
    # As it was written: older checkpoints stack tensors over layers.
    with unreadable_named(path):
        metadata = dist_checkpointing.load_content_metadata(str(path))
    state = _model_state(backend, metadata)
    with optimizer_fixes.plain_moments(backend.optimizer, wanted=with_optimizer):
        if with_optimizer:
            state["optimizer"] = backend.optimizer.sharded_state_dict(
                state, is_loading=True, metadata=dict(metadata)
            )
            sharded = backend.optimizer_config.use_distributed_optimizer
            common = checkpoint_fixes.common_parts(state["optimizer"], backend.optimizer) if sharded else []
            _check_moments(state["optimizer"], path)
        with unreadable_named(path):
            loaded = dist_checkpointing.load(state, str(path))
        for index, chunk in enumerate(backend.model):
            # With adapters the checkpoint has nothing else; missing tensors raised an error above.
            chunk.module.load_state_dict(loaded[_key(backend, index)], strict=not backend.args.lora_rank)
        if adam_step is not None:
            moments = loaded["optimizer"]
            if sharded:
                moments = checkpoint_fixes.with_common_parts(moments, common, step=adam_step)
            else:
                moments = checkpoint_fixes.with_own_groups(moments, backend.optimizer, step=adam_step)
            backend.optimizer.load_state_dict(moments)
            optimizer_fixes.unshare_steps(backend.optimizer)


def _check_moments(state: dict[str, Any], path: Path) -> None:
    """Refuse, on all ranks, a checkpoint without Adam moments for a parameter that is trained now."""
    with unreadable_named(path):
        written = dist_checkpointing.load_tensors_metadata(str(path))
    wanted = {part.key for part in nested_values(extract_sharded_tensors_and_factories(state)[0])}
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(wanted - set(written)))
    missing = sorted({key for keys in everywhere for key in keys})
    if missing:
        raise ValueError(
            f"checkpoint {path.parent} has no Adam state for {len(missing)} tensors that train now, the "
            f"first is {missing[0]}: resume with the --freeze-params-name-list or "
            "--only-train-params-name-list that it was saved with, or reset Adam with --no-load-optim."
        )


def _key(backend: Trainer, index: int) -> str:
    return f"model{index}" if len(backend.model) > 1 else "model"


def _model_state(backend: Trainer, metadata: dict[str, Any]) -> dict[str, Any]:
    state = {}
    for index, chunk in enumerate(backend.model):
        found = chunk.module.sharded_state_dict(metadata=dict(metadata))
        if backend.args.lora_rank:
            # The model's own weights come from --hf-checkpoint and are not saved.
            trained = {name for name, p in chunk.module.named_parameters() if p.requires_grad}
            found = {name: part for name, part in found.items() if name in trained}
        state[_key(backend, index)] = found
    return state


def check_model(backend: Trainer, path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, which must be of this backend and fit this model."""
    written = read_manifest(path)
    if written.get("backend") != BACKEND:
        raise ValueError(
            f"checkpoint {path} was written by --train-backend {written.get('backend', 'fsdp')}: load it "
            "there, or start from a Hugging Face folder that it wrote (--save-hf)."
        )
    wrong = _differences(written["model"], fingerprint(backend))
    if wrong:
        raise ValueError(f"checkpoint {path} is of another model than --hf-checkpoint: {'; '.join(wrong)}.")
    return written
