"""Reads weights under hub names into any layout, and exports them from any layout by buckets.

Every parameter is mapped exactly once; an error lists what is missing, left over or wrongly shaped.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from slime.backends.base import Bucket
from slime.backends.families.base import SCALAR_HEAD, Dims, Family, Rule, to_hub, to_local
from slime.backends.megatron.modules.model import PackedGPTModel
from slime.backends.shared.hub_folder import CheckpointFolder, ExpertsApart, listed
from slime.backends.shared.scalar_head import draw_head
from slime.backends.torch_dist.reading import TorchDistFolder
from slime.utils.files.torch_dist_folder import is_torch_dist


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter (or saved buffer) of this rank, and the hub tensors that it is made of."""

    parameter: Tensor
    rule: Rule
    hub: tuple[str, ...]  # of this rank's expert, where the parameter is an expert's; "": not exported
    shown: bool  # False: a second copy of a tied matrix, which must not be exported
    added: Callable[[], Tensor] | None = None  # fp32, of this rank's shape: an adapter's product

    @property
    def exported(self) -> Tensor:
        """Return the parameter in the form that engines and folders get."""
        if self.added is None:
            return self.parameter.detach()
        return (self.parameter.float() + self.added()).to(self.parameter.dtype)


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """Description of an exported parameter for all pipeline ranks; `hub`: names per expert-parallel rank."""

    kind: str
    is_expert: bool
    hub: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    def wire(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the export if `dtype` is requested."""
        return self.dtype if dtype is None or self.kind == "exact" else dtype


class SharedOut:
    """Gathers sharded tensors by buckets; all ranks call its methods together."""

    def __init__(self, entries: list[ParameterEntry], dims: Dims, device: torch.device) -> None:
        self.entries, self._dims, self._device = entries, dims, device
        self._plan: list[list[ParameterPiece]] | None = None

    @torch.no_grad()
    def buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        """Whole tensors under hub names on every rank, at most about `bucket_bytes` at a time."""
        pp = parallel_state.get_pipeline_model_parallel_group()
        for stage, pieces_of_stage in enumerate(self.pieces()):
            entries = iter(self._shown if stage == pp.rank() else [])
            for pieces in _grouped(pieces_of_stage, bucket_bytes, dtype):
                if stage == pp.rank():
                    gathered = self._over_shards(pieces, [next(entries).exported for _ in pieces], dtype)
                else:
                    shape = (_sharing_group(pieces).size(), sum(piece.count for piece in pieces))
                    gathered = torch.empty(shape, dtype=pieces[0].wire(dtype), device=self._device)
                if pp.size() > 1:
                    dist.broadcast(gathered, src=dist.get_process_group_ranks(pp)[stage], group=pp)
                yield self._split(pieces, gathered)

    def stage_buckets(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
        """The buckets of this rank's own pipeline stage, on the ranks of that stage alone.

        All ranks call it together; then each stage goes through its buckets independently.
        """
        # Not in the generator: stages that start later must take part when the pieces are gathered.
        pieces = self.pieces()[parallel_state.get_pipeline_model_parallel_rank()]
        return self._own_buckets(_grouped(pieces, bucket_bytes, dtype), dtype)

    @torch.no_grad()
    def _own_buckets(
        self, groups: Iterator[list[ParameterPiece]], dtype: torch.dtype | None
    ) -> Iterator[Bucket]:
        entries = iter(self._shown)
        for pieces in groups:
            parameters = [next(entries).exported for _ in pieces]
            yield self._split(pieces, self._over_shards(pieces, parameters, dtype))

    @property
    def _shown(self) -> list[ParameterEntry]:
        return [entry for entry in self.entries if entry.shown]

    def pieces(self) -> list[list[ParameterPiece]]:
        """Return the parameters that each pipeline stage exports; gathered once, by all ranks together."""
        if self._plan is None:
            ep = parallel_state.get_expert_model_parallel_group()
            mine = [entry.hub for entry in self._shown]
            per_expert_rank: list[Any] = [None] * ep.size()
            dist.all_gather_object(per_expert_rank, mine, group=ep)
            pieces = [
                ParameterPiece(
                    entry.rule.kind,
                    entry.rule.is_expert,
                    tuple(names[i] for names in per_expert_rank) if entry.rule.is_expert else (entry.hub,),
                    tuple(entry.parameter.shape),
                    entry.parameter.dtype,
                )
                for i, entry in enumerate(self._shown)
            ]
            pp = parallel_state.get_pipeline_model_parallel_group()
            self._plan = [[] for _ in range(pp.size())]
            dist.all_gather_object(self._plan, pieces, group=pp)
        return self._plan

    def _over_shards(
        self, pieces: list[ParameterPiece], parameters: list[Tensor], dtype: torch.dtype | None
    ) -> Tensor:
        """Return [ranks, count]: one all-gather over the ranks of the stage that share these parameters."""
        group = _sharing_group(pieces)
        flat = torch.cat([p.to(pieces[0].wire(dtype)).flatten() for p in parameters])
        parts = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(parts, flat, group=group)
        return torch.stack(parts)

    def _split(self, pieces: list[ParameterPiece], gathered: Tensor) -> Bucket:
        bucket: Bucket = []
        start = 0
        for piece in pieces:
            parts = [row[start : start + piece.count].view(piece.shape) for row in gathered]
            start += piece.count
            # Ranks of an expert group count expert-tensor ranks first.
            per_expert = len(parts) // len(piece.hub)
            for i, names in enumerate(piece.hub):
                tensors = to_hub(piece.kind, parts[i * per_expert : (i + 1) * per_expert], self._dims)
                named = zip(names, tensors, strict=True)
                bucket += [(name, tensor.contiguous()) for name, tensor in named if name]
        return bucket

    @property
    def names(self) -> set[str]:
        """The names of all tensors, on whichever rank they are; a collective unless `pieces` was called."""
        pieces = [piece for stage in self.pieces() for piece in stage]
        return {name for piece in pieces for names in piece.hub for name in names if name}


class HubWeights(SharedOut):
    """Pairs this rank's parameters with hub tensors; all ranks call its methods together."""

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        family: Family,
        dims: Dims,
        *,
        tied: bool,
        scalar_seed: int | None = None,
    ) -> None:
        """`scalar_seed`: the model has a scalar head, drawn from this seed if a folder has none."""
        self._family, self._dims, self._scalar_seed = family, dims, scalar_seed  # `_entries_of` reads it
        self._tied = tied and scalar_seed is None
        self._rules = family.all_rules
        entries = [entry for chunk in chunks for entry in self._entries_of(chunk)]
        super().__init__(entries, dims, entries[0].parameter.device)

    def _entries_of(self, chunk: PackedGPTModel) -> Iterator[ParameterEntry]:
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts * parallel_state.get_expert_model_parallel_rank()
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if self._matches(name))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if name == SCALAR_HEAD.mcore and self._scalar_seed is not None:
                yield ParameterEntry(parameter, SCALAR_HEAD, SCALAR_HEAD.hub, True)
                continue
            rule, found = self._rule_of(name)
            head = found.get("head", 0)
            numbers = {
                "layer": found.get("layer", 0) + offset,
                "expert": found.get("expert", 0) + first_expert,
            }
            numbers |= {"head": head, "beyond": self._dims.layers + head}
            # With MTP heads, the last pipeline stage also holds the embedding.
            copy = name == "output_layer.weight" and self._tied
            copy = copy or (name == "embedding.word_embeddings.weight" and not chunk.pre_process)
            names = self._rule_of("embedding.word_embeddings.weight")[0].hub if copy else rule.hub
            hub = tuple(name.format(**numbers) for name in names)
            yield ParameterEntry(parameter, rule, hub, not copy)

    def _matches(self, name: str) -> list[tuple[Rule, re.Match[str]]]:
        return [(rule, match) for rule in self._rules if (match := rule.pattern.fullmatch(name))]

    def _rule_of(self, name: str) -> tuple[Rule, dict[str, int]]:
        found = self._matches(name)
        assert len(found) == 1, (
            f"{len(found)} rules of {self._family.model_type} match Megatron's parameter {name}"
        )
        rule, match = found[0]
        return rule, {key: int(value) for key, value in match.groupdict().items()}

    @property
    def buffers(self) -> list[Tensor]:
        """Return untrained tensors that belong to the weights; copies of the weights must include them."""
        return [entry.parameter for entry in self.entries if not isinstance(entry.parameter, nn.Parameter)]

    # -- in --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, path: str | Path, hf_config: Any) -> None:
        """Read an HF folder (or hub id), or a torch_dist folder of such a model, into the parameters."""
        folder = TorchDistFolder(path, hf_config) if is_torch_dist(path) else ExpertsApart(path)
        self._check_names(folder.names, folder.path)
        wrong = [text for entry in self.entries for text in self._load_entry(entry, folder)]
        if wrong:
            raise ValueError(f"{path} is of another shape than its config says: {listed(wrong)}.")

    def _load_entry(self, entry: ParameterEntry, folder: CheckpointFolder | TorchDistFolder) -> Iterator[str]:
        if self._scalar_seed is not None and entry.rule is SCALAR_HEAD and entry.hub[0] not in folder.names:
            # Every rank draws the same numbers.
            entry.parameter.copy_(draw_head(entry.parameter.shape[1], self._scalar_seed))
            return
        tensors = [folder.read(name) for name in entry.hub]
        size, rank = _shards(entry.rule)
        local = to_local(entry.rule.kind, tensors, self._dims, size, rank)
        if local.shape != entry.parameter.shape:
            shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(entry.hub, tensors, strict=True))
            needed = list(entry.parameter.shape)
            yield f"{shapes} (this rank needs {needed} and was given {list(local.shape)})"
            return
        entry.parameter.copy_(local)

    def _check_names(self, present: set[str], path: Path) -> None:
        own: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(own, {name for entry in self.entries for name in entry.hub})
        wanted: set[str] = set().union(*own)
        extra = {name for name in present - wanted if not name.endswith("rotary_emb.inv_freq")}
        mtp = self._family.mtp_pattern(self._dims)
        extra = {name for name in extra if mtp is None or not mtp.fullmatch(name)}
        if self._family.nested:
            extra = {name for name in extra if not name.startswith("model.visual.")}
        if self._tied or self._scalar_seed is not None:
            extra.discard("lm_head.weight")
        if self._scalar_seed is not None:
            wanted -= set(SCALAR_HEAD.hub)
            extra -= set(SCALAR_HEAD.hub)
        problems = []
        if wanted - present:
            problems.append(
                f"{len(wanted - present)} tensors are missing: {listed(sorted(wanted - present))}"
            )
        if extra:
            problems.append(f"{len(extra)} tensors are not in the model: {listed(sorted(extra))}")
        if problems:
            raise ValueError(
                f"{path} does not match its config ({self._family.model_type}). {'; '.join(problems)}."
            )


def _sharing_group(pieces: list[ParameterPiece]) -> dist.ProcessGroup:
    """Return the ranks of a stage over which these parameters (all experts' or none) are spread."""
    if pieces[0].is_expert:
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _shards(rule: Rule) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks that share a parameter, and the index of this one."""
    if rule.is_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()


def _grouped(
    pieces: list[ParameterPiece], bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[list[ParameterPiece]]:
    """Yield runs of pieces of one group and dtype within the limit when gathered (a larger one alone)."""
    group: list[ParameterPiece] = []
    size = 0
    for piece in pieces:
        nbytes = piece.count * _sharing_group([piece]).size() * piece.wire(dtype).itemsize
        same = not group or (piece.is_expert, piece.wire(dtype)) == (group[0].is_expert, group[0].wire(dtype))
        if group and (not same or size + nbytes > bucket_bytes):
            yield group
            group, size = [], 0
        group.append(piece)
        size += nbytes
    if group:
        yield group
