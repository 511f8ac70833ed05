"""Writes a Hugging Face model as a torch_dist folder, with the keys and global shapes of Megatron.

Tensors are read, joined and written one at a time, and each layer is a piece of its own, so that a reader
with any parallel layout reads only what it needs.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from slime.backends.families import dims_of, family_of
from slime.backends.families.base import LAYER, Dims, Rule, to_local
from slime.backends.shared.hub_folder import CheckpointFolder, ExpertsApart
from slime.backends.torch_dist.keys import BRANCH_NORMS, FUSED_ATTENTION, FUSED_MLP, LATENT_NORMS
from slime.utils.files.torch_dist_folder import CONFIG, RELEASE, TRACKER

# Source of one piece of a stored tensor: hub names, and the rule that joins them.
WeightsSource = tuple[Rule, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it will be stored: its sources by their index in the leading dimensions (layer, expert)."""

    sources: dict[tuple[int, ...], WeightsSource]
    lengths: tuple[int, ...]  # of the leading dimensions


def write(source: Path, target: Path, hf_config: Any) -> None:
    """Write `target/release` with the weights of the HF folder `source`; it appears whole or not at all."""
    staging = target.with_name(target.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / RELEASE).mkdir(parents=True)
    folder = ExpertsApart(source)
    planner = _Planner(_plan(folder, hf_config), folder, dims_of(hf_config))
    save({}, storage_writer=FileSystemWriter(staging / RELEASE), planner=planner, no_dist=True)
    # Files that Megatron requires in a folder before it loads tensors.
    kinds = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in kinds}
    (staging / RELEASE / CONFIG).write_text(json.dumps(kinds | versions))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, staging / RELEASE / "common.pt")
    (staging / TRACKER).write_text(RELEASE)
    if target.is_dir():
        target.rmdir()  # empty: the command refuses other folders
    staging.rename(target)


def _plan(folder: CheckpointFolder, hf_config: Any) -> dict[str, Stored]:
    """Return key -> content; ValueError names hub tensors that are not in the family's model."""
    family, dims = family_of(hf_config), dims_of(hf_config)
    settings = family.settings(hf_config)
    left, plan = set(folder.names), dict[str, Stored]()
    for rule in family.all_rules:
        for numbers in _numbers(rule, dims, settings.get("num_moe_experts") or 0):
            hub = tuple(name.format(**numbers) for name in rule.hub)
            if set(hub) <= left:
                left -= set(hub)
                key, index, lengths = _place(rule, numbers, settings)
                plan.setdefault(key, Stored({}, lengths)).sources[index] = rule, hub
    if hf_config.tie_word_embeddings:
        plan.pop("output_layer.weight", None)
    mtp = family.mtp_pattern(dims)
    left = {name for name in left if not (mtp and mtp.fullmatch(name)) and "inv_freq" not in name}
    short = [key for key, stored in plan.items() if len(stored.sources) != torch.Size(stored.lengths).numel()]
    if left or short or "embedding.word_embeddings.weight" not in plan:
        what = f"no place for {min(left)}" if left else f"not all of {min(short, default='its embedding')}"
        raise ValueError(
            f"--hf-checkpoint {folder.path} is no {hf_config.model_type} as its config says: {what}."
        )
    return plan


def _numbers(rule: Rule, dims: Dims, experts: int) -> list[dict[str, int]]:
    layers = range(dims.layers) if "{layer}" in rule.mcore else [0]
    heads = range(dims.mtp_heads) if "{head}" in rule.mcore else [0]
    return [
        {"layer": layer, "expert": expert, "head": head, "beyond": dims.layers + head}
        for layer in layers
        for head in heads
        for expert in (range(experts) if rule.is_expert else [0])
    ]


def _place(
    rule: Rule, numbers: dict[str, int], settings: dict[str, Any]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the key of a parameter, its place in the tensor, and the lengths of the leading dimensions."""
    name = _fused(rule.mcore, numbers["layer"], settings)
    places: list[tuple[int, int]] = []
    alike = not {"moe_layer_freq", "linear_attention_freq"} & settings.keys()  # Megatron's rule
    if alike and name.startswith(LAYER):
        name = name.replace("{layer}.", "")
        places.append((numbers["layer"], settings["num_layers"]))
    if rule.is_expert:
        name = name.replace("local_experts.{expert}", "experts")
        places.append((numbers["expert"], settings["num_moe_experts"]))
    return name.format(**numbers), tuple(i for i, _ in places), tuple(n for _, n in places)


def _fused(name: str, layer: int, settings: dict[str, Any]) -> str:
    """The name of a parameter where norms are fused into the matrix after them, as in Megatron's models."""
    inside = name.rpartition("transformer_layer.")[2].removeprefix(LAYER)
    pattern = settings.get("moe_layer_freq")
    moe = pattern is not None and (not name.startswith(LAYER) or pattern[layer])
    latent = settings.get("multi_latent_attention")
    names = BRANCH_NORMS | (LATENT_NORMS if latent else FUSED_ATTENTION) | ({} if moe else FUSED_MLP)
    return name.removesuffix(inside) + names.get(inside, inside)


class _Planner(DefaultSavePlanner):
    """Describes the tensors to torch's writer, and creates each piece just before it is written."""

    def __init__(self, plan: dict[str, Stored], folder: CheckpointFolder, dims: Dims) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan, self._folder, self._dims = plan, folder, dims

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, stored in self._plan.items():
            first = self._whole(next(iter(stored.sources.values())), meta=True)
            for index in stored.sources:
                offsets = torch.Size((*index, *[0] * first.ndim))
                chunk = ChunkStorageMetadata(offsets, torch.Size((*[1] * len(index), *first.shape)))
                size = torch.Size((*stored.lengths, *first.shape))
                data = TensorWriteData(chunk, TensorProperties(dtype=first.dtype), size)
                items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        stored = self._plan[write_item.index.fqn]
        assert write_item.tensor_data is not None and write_item.index.offset is not None
        source = stored.sources[tuple(write_item.index.offset[: len(stored.lengths)])]
        return self._whole(source).reshape(write_item.tensor_data.chunk.sizes)

    def _whole(self, source: WeightsSource, *, meta: bool = False) -> Tensor:
        rule, hub = source
        tensors = [self._folder.read(name) for name in hub]
        tensors = [tensor.to("meta") for tensor in tensors] if meta else tensors
        return to_local(rule.kind, tensors, self._dims, 1, 0).contiguous()
