"""Converts tensors of a transformers model to the names in its checkpoint.

transformers fuses some tensors (all experts of a layer in one), and builds only the text model of a
vision-language checkpoint; engines and readers of checkpoints know the names of the hub.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
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
    """A hub tensor inside an in-memory one: all of it, or rows of one expert."""

    name: str  # of the hub
    expert: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, tensor: "Tensor") -> "Tensor":
        return tensor if self.expert is None else tensor[self.expert, self.start : self.stop]


def parts_of(lm: Any, name: str, tensor: "Tensor", known: Collection[str]) -> list[Part]:
    """Return where hub tensors lie in an in-memory tensor; ValueError: they are not just parts of it."""
    found = {n: t.shape for n, t in hub_tensors(lm, [(name, tensor.to("meta"))], known)}
    if list(found.values()) == [tensor.shape]:
        return [Part(next(iter(found)))]
    parts, filled = [], dict[int, int]()
    for hub_name, shape in found.items():
        number = re.search(r"experts\.(\d+)\.", hub_name)
        if number is None or tensor.dim() != 3 or shape[1:] != tensor.shape[2:]:
            raise ValueError(f"{name} has another layout in memory than {hub_name}")
        expert = int(number[1])
        start = filled.get(expert, 0)
        filled[expert] = start + shape[0]
        parts.append(Part(hub_name, expert, start, filled[expert]))
    if filled != dict.fromkeys(range(len(tensor)), tensor.shape[1]):
        raise ValueError(f"{name} has another layout in memory than in its checkpoint")
    return parts


def is_converted(lm: Any) -> bool:
    # Only present in transformers 5; dense families have no conversions.
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(lm, add_legacy=False))


def _layer_of(name: str) -> str:
    """Return `model.layers.3` for `model.layers.3.mlp.up_proj.weight`; the name itself outside of layers."""
    layer = re.match(r".*?\.\d+(?=\.|$)", name)
    return layer[0] if layer else name
