"""Low-rank adapters on Megatron's column- and row-parallel layers, and on those of single experts.

Megatron keeps query, key and value in one matrix, and gate and up projection in another; peft gives each an
adapter of its own. Here, too, a fused layer has a first factor for each of its parts, and one second factor
whose rows are ordered as in the fused matrix. If a layer is split over tensor-parallel ranks, so is its
adapter: one factor is split like the matrix, the other is whole on every rank, and only the activations
between the two, of the adapter's small rank, are communicated.

Refused with an error are experts that are split over tensor-parallel ranks, MTP heads, and shared experts
with overlapped communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.families.base import Dims, Rule, hub_rows, to_local
from slime.backends.megatron.modules.model import PackedGPTModel
from slime.backends.megatron.weights import SCALAR_HEAD, HubWeights, ParameterEntry, SharedOut
from slime.backends.shared.adapters import ALL_LINEAR, first_factor, saved_name
from slime.utils.models.hub_names import NESTED, TEXT

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear
_GATED = ("gate_up", "fused_gate_up")


class Adapter(nn.Module):
    """The adapter of one layer on this rank: what it adds to the layer's output, or to its weight.

    `parts` are the hub names of the layers that the matrix is made of, "" for one without an adapter.
    """

    _owners: Tensor | None  # [rows, targets]: which part of a fused matrix a row belongs to

    def __init__(self, linear: Linear, rule: Rule, parts: Sequence[str], args: Args, dims: Dims) -> None:
        super().__init__()
        self.rule, self.parts = rule, tuple(parts)
        self.is_row = isinstance(linear, RowParallelLinear)
        self.scale = args.lora_alpha / args.lora_rank
        group, weight = linear.tp_group, linear.weight
        self._travel = _between(linear, self.is_row) if group.size() > 1 else None
        for name in self.targets:
            whole = first_factor(name, (args.lora_rank, linear.input_size), args.seed)
            local = to_local(self.kind_of_first, [whole], dims, group.size(), group.rank())
            self.register_parameter(_attribute(name), nn.Parameter(local.contiguous().to(weight)))
        self.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], args.lora_rank))
        owners = None
        if len(self.parts) > 1:
            rows = _part_of_rows(rule.kind, linear.output_size, dims, group.size(), group.rank())
            targeted = torch.tensor([index for index, name in enumerate(self.parts) if name])
            owners = (rows[:, None] == targeted).to(weight.device)
        self.register_buffer("_owners", owners, persistent=False)
        for parameter, cut in ((self.lora_B, not self.is_row), *((p, self.is_row) for p in self.first)):
            _mark(parameter, linear, cut=cut, dim=int(self.is_row))

    @property
    def targets(self) -> list[str]:
        return [name for name in self.parts if name]

    @property
    def first(self) -> list[Tensor]:
        """The first factor of each part, [rank, in] (a row-parallel layer: this rank's columns)."""
        return [getattr(self, _attribute(name)) for name in self.targets]

    @property
    def kind_of_first(self) -> str:
        return "row" if self.is_row else "replicated"

    @property
    def kind_of_second(self) -> str:
        return "replicated" if self.is_row else self.rule.kind

    def forward(self, x: Tensor) -> Tensor:
        first, second = self._factors()
        hidden = F.linear(x, first)
        if self._travel is not None:
            hidden = self._travel(hidden)
        return F.linear(hidden, second) * self.scale

    def product(self) -> Tensor:
        """Return the adapter's contribution to this rank's part of the weight, in fp32."""
        first, second = self._factors()
        return self.scale * (second.float() @ first.float())

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return [targets * rank, in] and [out, targets * rank], zero where a row is not of a target."""
        if self._owners is None:
            return self.first[0], self.lora_B
        spread = self.lora_B[:, None, :] * self._owners[:, :, None]
        return torch.cat(self.first), spread.flatten(1)

    def sharded_state(self, prefix: str, offsets: Any, linear: Linear, metadata: dict[str, Any]) -> Any:
        """Return the adapter's sharded state, which any other layout can load."""
        axes = {_attribute(name): 1 for name in self.targets} if self.is_row else {"lora_B": 0}
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": linear.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        found = make_sharded_tensors_for_checkpoint(state, prefix, axes, offsets, **groups)
        if self.kind_of_second in _GATED:
            # Each rank has rows of the gate above rows of the up projection.
            single = metadata.get("singleton_local_shards", False)
            key = f"{prefix}lora_B"
            found[key] = apply_swiglu_sharded_factory(found[key], offsets, single)
        return found


class _Adapted:
    """A layer of Megatron with an adapter; the class of the existing layer object is replaced."""

    adapter: Adapter

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc] # of Megatron's layer
        return out + self.adapter(input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return found | self.adapter.sharded_state(f"{prefix}adapter.", sharded_offsets, self, metadata)


class AdaptedColumn(_Adapted, ColumnParallelLinear):
    pass


class AdaptedRow(_Adapted, RowParallelLinear):
    pass


ADAPTED = {ColumnParallelLinear: AdaptedColumn, RowParallelLinear: AdaptedRow}


def add_adapters(args: Args, chunks: Sequence[PackedGPTModel], hub: HubWeights, dims: Dims) -> SharedOut:
    """Freeze the model but for a scalar head, and give the layers that --lora-target-modules names adapters.

    Returns the adapters under the names of peft; `hub` exports the model with them merged in.
    """
    layers = [m for chunk in chunks for m in chunk.modules() if type(m) in ADAPTED and m.weight is not None]
    linear = {id(layer.weight): layer for layer in layers}
    places = [(i, linear[id(e.parameter)]) for i, e in enumerate(hub.entries) if id(e.parameter) in linear]
    wanted = {i: _targets(hub.entries[i], args.lora_target_modules) for i, _ in places}
    _check(args, chunks[0], [(hub.entries[i], wanted[i]) for i, _ in places])
    for entry in hub.entries:
        if isinstance(entry.parameter, nn.Parameter):
            entry.parameter.requires_grad_(entry.rule is SCALAR_HEAD)
    entries: list[ParameterEntry] = []
    for i, module in places:
        if any(wanted[i]):
            adapter = Adapter(module, hub.entries[i].rule, wanted[i], args, dims)
            module.__class__ = ADAPTED[type(module)]
            module.adapter = adapter
            hub.entries[i] = replace(hub.entries[i], added=adapter.product)
            entries += _entries_of(adapter)
    found = SharedOut(entries, dims, hub.entries[0].parameter.device)
    found.pieces()  # gathered now: later a single rank needs the names
    return found


def _targets(entry: ParameterEntry, named: list[str]) -> tuple[str, ...]:
    """Return the layers in a matrix, "" for those without an adapter; names match as in peft.

    peft knows the text model alone, also where the hub nests it beside a vision tower.
    """
    layers = [name.removesuffix(".weight").replace(NESTED, TEXT) for name in entry.hub]
    if entry.rule.kind == "vocab":
        return ("",) * len(layers)
    every = named == ALL_LINEAR
    return tuple(
        layer if every or any(layer == name or layer.endswith("." + name) for name in named) else ""
        for layer in layers
    )


def _check(args: Args, chunk: PackedGPTModel, found: list[tuple[ParameterEntry, tuple[str, ...]]]) -> None:
    """Refuse, on all ranks, names without a layer and layers that cannot have an adapter."""
    own = {
        (name.removesuffix(".weight"), bool(target), entry.rule.is_expert)
        for entry, targets in found
        for name, target in zip(entry.hub, targets, strict=True)
        if entry.rule.kind != "vocab"
    }
    everywhere: list[set[tuple[str, bool, bool]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    layers = set().union(*everywhere)
    for name in [] if args.lora_target_modules == ALL_LINEAR else args.lora_target_modules:
        if not any(layer == name or layer.endswith("." + name) for layer, _, _ in layers):
            leaves = ", ".join(sorted({layer.rpartition(".")[2] for layer, _, _ in layers}))
            raise ValueError(
                f"--lora-target-modules: {name!r} is no linear layer of {args.hf_checkpoint} that takes an "
                f"adapter; there are {leaves}."
            )
    if chunk.config.moe_shared_expert_overlap:
        raise ValueError("--lora-rank with moe_shared_expert_overlap is not built: remove the overlap.")
    if not any(target and is_expert for _, target, is_expert in layers):
        return
    fix = "name other layers in --lora-target-modules, such as q_proj k_proj v_proj o_proj"
    if args.expert_tensor_parallel_size > 1:
        raise ValueError(
            f"--expert-tensor-parallel-size is {args.expert_tensor_parallel_size}: adapters of experts are "
            f"not split over ranks; use 1, or {fix}."
        )
    if args.lora_sync == "adapter":
        raise ValueError(
            "--lora-sync adapter with adapters on experts: engines take these merged into the model only; "
            f"use --lora-sync merged, or {fix}."
        )


def _entries_of(adapter: Adapter) -> list[ParameterEntry]:
    """Return both factors as they are exported, under peft's names."""
    mcore, seconds = adapter.rule.mcore, [name and saved_name(name, "lora_B") for name in adapter.parts]
    entries = []
    for name, parameter in zip(adapter.targets, adapter.first, strict=True):
        hub = (saved_name(name, "lora_A"),)
        entries.append(ParameterEntry(parameter, Rule(mcore, hub, adapter.kind_of_first), hub, True))
    rule = Rule(mcore, tuple(seconds), adapter.kind_of_second)
    return [*entries, ParameterEntry(adapter.lora_B, rule, tuple(seconds), True)]


def _attribute(layer: str) -> str:
    """Return the attribute of an adapter that holds the first factor of a layer."""
    return "lora_A_" + layer.rpartition(".")[2]


def _between(linear: Linear, is_row: bool) -> Callable[[Tensor], Tensor]:
    """Return the communication between the two factors; its backward pass sums the gradients."""
    group, cut_tokens = linear.tp_group, linear.config.sequence_parallel
    if is_row:
        reduce = reduce_scatter_to_sequence_parallel_region if cut_tokens else None
        return lambda x: (reduce or reduce_from_tensor_model_parallel_region)(x, group=group)
    if cut_tokens:
        return lambda x: gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=group
        )
    return lambda x: copy_to_tensor_model_parallel_region(x, group=group)


def _part_of_rows(kind: str, rows: int, dims: Dims, size: int, rank: int) -> Tensor:
    """Return [rows of this rank]: the index of the part to which each row of a fused matrix belongs."""
    marks = [torch.full((count, 1), index) for index, count in enumerate(hub_rows(kind, rows, dims))]
    return to_local(kind, marks, dims, size, rank)[:, 0]


def _mark(parameter: Tensor, linear: Linear, *, cut: bool, dim: int) -> None:
    """Tell Megatron how ranks share a factor, which decides how gradients and their norm are summed."""
    weight: Any = linear.weight
    marked: Any = parameter
    marked.allreduce = weight.allreduce
    if linear.is_expert:
        # Whole on its rank, like the expert.
        set_tensor_model_parallel_attributes(parameter, weight.tensor_model_parallel, dim, 1)
        if getattr(weight, "sequence_parallel", False):
            marked.sequence_parallel = True
        return
    set_tensor_model_parallel_attributes(parameter, cut, dim, 1)
    if not cut and linear.config.sequence_parallel:
        # Each rank sees its slice of the sequence.
        marked.sequence_parallel = True
