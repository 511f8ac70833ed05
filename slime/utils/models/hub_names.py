"""Converts tensors of a transformers model to the names in its checkpoint.

transformers fuses some tensors (all experts of a layer in one), and builds only the text model of a
vision-language checkpoint; engines and readers of checkpoints know the names of the hub.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# The prefix of the text model in checkpoints of multimodal models, and in transformers' text model.
NESTED, TEXT = "model.language_model.", "model."


def folder_of(source: str) -> Path:
    """Return the folder of a model's files; those of a hub id are already in the cache."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file  # only needed here

    return Path(cached_file(source, "config.json")).parent


def saved_tensors(lm: Any, *, tied: bool = False) -> "Iterator[tuple[str, Tensor]]":
    """Yield (name, tensor) of parameters and saved buffers; a tied matrix once, or under each name."""
    parameters = lm.named_parameters(remove_duplicate=not tied)
    yield from ((name, parameter.data) for name, parameter in parameters)
    for module_name, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def hub_tensors(
    lm: Any, named: "Iterable[tuple[str, Tensor]]", known: Collection[str]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield in-memory tensors under hub names; `known`: the names in the checkpoint, if available."""
    nested = any(name.startswith(NESTED) for name in known) and not any(
        name.startswith(NESTED) for name, _ in lm.named_parameters()
    )

    def hub_name(name: str) -> str:
        return NESTED + name.removeprefix(TEXT) if nested and name.startswith(TEXT) else name

    for name, tensor in _reverted(lm, named, lambda name: hub_name(name) in known):
        yield hub_name(name), tensor


def _reverted(
    lm: Any, named: "Iterable[tuple[str, Tensor]]", is_hub_name: Callable[[str], bool]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield tensors renamed and split as on the hub, unless the hub has them as they are.

    Families that transformers fuses in memory are reverted a decoder layer at a time: no hub tensor spans two
    layers.
    """
    if not is_converted(lm):
        yield from named
        return
    # Only present in transformers 5, and only needed for fused families.
    from transformers.core_model_loading import revert_weight_conversion

    layer: dict[str, Tensor] = {}
    current = None
    for name, tensor in named:
        key = _layer_of(name)
        if key != current and layer:
            yield from revert_weight_conversion(lm, layer).items()
            layer = {}
        current = key
        if is_hub_name(name):
            yield name, tensor
        else:
            layer[name] = tensor
    if layer:
        yield from revert_weight_conversion(lm, layer).items()


@dataclass(frozen=True, slots=True)
class Part:
    """A hub tensor inside an in-memory one: a box of it, in which dimensions may have another order."""

    name: str  # of the hub
    box: tuple[slice, ...]  # of the in-memory tensor
    dims: tuple[int, ...]  # for each dimension of the hub tensor the one of the in-memory tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.box[dim].stop - self.box[dim].start for dim in self.dims)

    def of(self, tensor: "Tensor") -> "Tensor":
        """Return the hub tensor as a view of the in-memory one."""
        kept = sorted(self.dims)
        inside = tensor[tuple(part if i in kept else part.start for i, part in enumerate(self.box))]
        return inside.permute([kept.index(dim) for dim in self.dims])

    def within(self, region: tuple[slice, ...]) -> "tuple[Part, tuple[slice, ...]] | None":
        """Return the part in coordinates of a region of the in-memory tensor, and the hub tensor's slices.

        None: the region holds nothing of this hub tensor.
        """
        both = [
            slice(max(own.start, held.start), min(own.stop, held.stop))
            for own, held in zip(self.box, region, strict=True)
        ]
        if any(part.start >= part.stop for part in both):
            return None
        moved = tuple(_moved(part, held.start) for part, held in zip(both, region, strict=True))
        return Part(self.name, moved, self.dims), tuple(_moved(both[d], self.box[d].start) for d in self.dims)


def _moved(part: slice, origin: int) -> slice:
    return slice(part.start - origin, part.stop - origin)


def parts_of(lm: Any, tensors: "Mapping[str, Tensor]", known: Collection[str]) -> dict[str, list[Part]]:
    """Return for each in-memory tensor the hub tensors in it; ValueError: some are not just parts of it."""
    from torch import Tensor, empty
    from torch.overrides import TorchFunctionMode

    class KeepViews(TorchFunctionMode):
        """transformers copies the parts that it splits off; here they must remain views."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))

    wholes = {name: empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    owners = {id(whole): name for name, whole in wholes.items()}
    parts: dict[str, list[Part]] = {name: [] for name in wholes}
    with KeepViews():
        views = list(hub_tensors(lm, wholes.items(), known))
    for hub_name, view in views:
        owner = owners.get(id(view)) or owners.get(id(view._base))
        if owner is None:
            raise ValueError(f"{hub_name} is not a part of one tensor in memory")
        parts[owner].append(_part_of(hub_name, view, wholes[owner]))
    for name, whole in wholes.items():
        if sum(math.prod(part.shape) for part in parts[name]) != whole.numel():
            raise ValueError(f"{name} has another layout in memory than in its checkpoint")
        parts[name].sort(key=lambda part: [own.start for own in part.box])
    return parts


def _part_of(name: str, view: "Tensor", whole: "Tensor") -> Part:
    """Find out from offset and strides where a view lies in a whole tensor."""
    if view is whole:
        return Part(name, tuple(slice(0, size) for size in whole.shape), tuple(range(whole.dim())))
    rest, starts = view.storage_offset(), list[int]()
    for stride in whole.stride():
        starts.append(rest // stride)
        rest %= stride
    box = [slice(start, start + 1) for start in starts]
    dims = list[int]()
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fitting = (
            d
            for d in range(whole.dim())
            if d not in dims and whole.stride(d) == stride and starts[d] + size <= whole.shape[d]
        )
        dim = next(fitting, None)
        if dim is None:
            raise ValueError(f"{name} has another layout in its checkpoint than in memory")
        dims.append(dim)
        box[dim] = slice(starts[dim], starts[dim] + size)
    return Part(name, tuple(box), tuple(dims))


def is_converted(lm: Any) -> bool:
    # Only present in transformers 5; dense families have no conversions.
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(lm, add_legacy=False))


def _layer_of(name: str) -> str:
    """Return `model.layers.3` for `model.layers.3.mlp.up_proj.weight`; the name itself outside of layers."""
    layer = re.match(r".*?\.\d+(?=\.|$)", name)
    return layer[0] if layer else name
