"""Reads the weights of a torch_dist folder under hub names, for any parallel sizes of its writer."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.families import dims_of, family_of
from slime.backends.families.base import SCALAR_HEAD, Rule, to_hub
from slime.backends.shared.hub_folder import listed
from slime.backends.torch_dist.keys import Slice, slices_of
from slime.backends.torch_dist.pieces import (
    UnknownLayout,
    damaged,
    read_slice,
    stored_tensors,
    why_incomplete,
)
from slime.utils.files.torch_dist_folder import is_release, is_torch_dist

logger = logging.getLogger(__name__)


def weights_source(path: str | Path, hf_config: Any, instead: str) -> str | Path:
    """Return `path`; or `instead`, with a warning, if `path` is a converted model in an unknown layout."""
    if not is_torch_dist(path):
        return path
    try:
        TorchDistFolder(path, hf_config)
    except UnknownLayout as error:
        if not is_release(path):
            raise ValueError(f"checkpoint {path} cannot be read: {error}.") from None
        logger.warning("%s cannot be read (%s): the weights of %s are used instead.", path, error, instead)
        return instead
    return path


class TorchDistFolder:
    """One iteration of a checkpoint, read a hub tensor at a time, as `CheckpointFolder` reads HF folders."""

    def __init__(self, path: str | Path, hf_config: Any) -> None:
        self.path = Path(path).expanduser()
        self._dims = dims_of(hf_config)
        family = family_of(hf_config)
        self._mtp = family.mtp_pattern(self._dims)
        rules = [(rule.pattern, rule) for rule in family.all_rules]
        slices: dict[str, list[Slice]] = {}
        stored = stored_tensors(self.path)
        if why := why_incomplete(self.path, stored):
            raise damaged(self.path, why)
        for tensor in stored.values():
            for part in slices_of(tensor):
                slices.setdefault(part.name, []).append(part)
        self._parts: dict[str, tuple[Rule, tuple[str, ...], list[Slice]]] = {}
        unknown = []
        for name, parts in slices.items():
            parts.sort(key=lambda part: part.half)
            found = [(rule, match) for pattern, rule in rules if (match := pattern.fullmatch(name))]
            if name == SCALAR_HEAD.mcore and parts[0].tensor.size[0] == 1:
                rule, hub = SCALAR_HEAD, SCALAR_HEAD.hub
            elif not found:
                unknown.append(parts[0].tensor.key)
                continue
            else:
                rule, numbers = found[0][0], {k: int(v) for k, v in found[0][1].groupdict().items()}
                numbers["beyond"] = self._dims.layers + numbers.get("head", 0)
                hub = tuple(text.format(**numbers) for text in rule.hub)
            self._parts |= dict.fromkeys(hub, (rule, hub, parts))
        if unknown or not self._parts:
            raise UnknownLayout(
                f"it holds no weights of a {hf_config.model_type}"
                if not self._parts
                else f"a {hf_config.model_type} does not have {listed(sorted(set(unknown)))}"
            )
        self._last: tuple[tuple[str, ...], list[Tensor]] = ((), [])

    @property
    def names(self) -> set[str]:
        return set(self._parts)

    def is_mtp_head(self, name: str) -> bool:
        return self._mtp is not None and bool(self._mtp.fullmatch(name))

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or a region of it; tensors that share a parameter are read together, once."""
        rule, hub, parts = self._parts[name]
        if self._last[0] != hub:
            whole = torch.cat([read_slice(self.path, part.tensor, part.index) for part in parts])
            self._last = hub, self._split(rule, hub, whole)
        return self._last[1][hub.index(name)][region or ()]

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the result of `read`, without reading it."""
        rule, hub, parts = self._parts[name]
        sizes = [part.tensor.size[len(part.index) :] for part in parts]
        whole = torch.cat([torch.empty(size, device="meta") for size in sizes])
        return self._split(rule, hub, whole)[hub.index(name)].shape

    def tensors(self, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, layer by layer; without the output matrix if it is the embedding."""
        for name in self._parts:
            if not (tied and name == "lm_head.weight"):
                yield name, self.read(name)

    def _split(self, rule: Rule, hub: tuple[str, ...], whole: Tensor) -> list[Tensor]:
        try:
            if rule.kind == "vocab" and whole.shape[0] < self._dims.vocab:
                raise RuntimeError(f"it has fewer rows than the {self._dims.vocab} tokens of the vocabulary")
            return to_hub(rule.kind, [whole], self._dims)
        except RuntimeError as error:
            raise ValueError(
                f"checkpoint {self.path} is of another shape than --hf-checkpoint says: {rule.mcore} is "
                f"{list(whole.shape)} there, which makes no {', '.join(hub)} ({error}); give the model that "
                "it was converted from as --hf-checkpoint."
            ) from None


def check_fit(folder: TorchDistFolder, wanted: dict[str, torch.Size]) -> None:
    """Raise ValueError if the folder lacks tensors of the model, or holds them in other shapes."""
    missing = sorted(wanted.keys() - folder.names)
    wrong = [
        f"{name} is {list(folder.shape(name))} there and {list(shape)} here"
        for name, shape in wanted.items()
        if name in folder.names and folder.shape(name) != shape
    ]
    more = (name for name in folder.names - wanted.keys() if not folder.is_mtp_head(name))
    beyond = sorted(name for name in more if name.startswith("model.layers."))
    problems = [f"it has no {listed(missing)}"] * bool(missing) + wrong[:1]
    problems += [f"it has more layers or experts: {listed(beyond)}"] * bool(beyond)
    if missing or wrong or beyond:
        raise ValueError(
            f"checkpoint {folder.path} does not contain the model of --hf-checkpoint: {'; '.join(problems)}. "
            "Give the model that it was converted from as --hf-checkpoint."
        )
