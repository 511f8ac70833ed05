"""The weights of a Hugging Face folder or hub id, read one tensor at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.utils.files.safetensors_files import files_by_tensor
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, dequantize_part
from slime.utils.models.model_config import block_size_of

_SHOWN = 4
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class CheckpointFolder:
    """The safetensors of an HF folder, read one tensor at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            from huggingface_hub import snapshot_download  # with transformers; only needed for hub ids

            self.path = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
        self._files = files_by_tensor(self.path)
        if not self._files:
            raise ValueError(
                f"{self.path} holds no model.safetensors and no index of several: weights are read from "
                "safetensors; save the model again with save_pretrained."
            )
        self._open: dict[str, Any] = {}
        self._block = block_size_of(self.path)

    @property
    def names(self) -> set[str]:
        if self._block is None:
            return set(self._files)
        return {name for name in self._files if not name.endswith(SCALE_SUFFIX)}

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._stored(name).get_shape())

    def is_fp8(self, name: str) -> bool:
        return bool(self._stored(name).get_dtype().startswith("F8"))

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or a region of it; FP8 blocks are converted to fp32."""
        shape = self.shape(name)
        region = region or tuple(slice(0, size) for size in shape)
        tensor: Tensor = self._stored(name)[region]
        if not tensor.is_floating_point() or tensor.dtype.itemsize > 1:
            return tensor
        file, factors = self.path / self._files[name], name + SCALE_SUFFIX
        if self._block is None:
            raise ValueError(
                f"{name} in {file} is {tensor.dtype}, but config.json has no quantization_config of FP8 "
                "blocks: copy it again from the model, or use a checkpoint in 16 or 32 bits."
            )
        if factors not in self._files:
            raise ValueError(
                f"{name} in {file} is {tensor.dtype}, but no file of the folder has its factors {factors}: "
                "download the model again."
            )
        scale = self._stored(factors)[:]
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or tuple(scale.shape) != blocks:
            raise ValueError(
                f"{name} in {file} is {list(shape)} in FP8 blocks of {list(self._block)}, which has factors "
                f"{list(blocks)}, but {factors} is {list(scale.shape)}: the files are of different models."
            )
        return dequantize_part(tensor, scale, self._block, (region[0].start, region[1].start))

    def _stored(self, name: str) -> Any:
        from safetensors import safe_open  # with transformers, only needed here

        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        return self._open[file].get_slice(name)


class ExpertsApart(CheckpointFolder):
    """A folder that shows each expert under names of its own, also where one tensor holds all of a layer.

    Example: `mlp.experts.gate_up_proj` [8, 48, 32] is read as `mlp.experts.0.gate_proj.weight` [24, 32], ...
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        # Name -> the stored tensor, and the expert and the rows of it; the others are read as they are.
        self._apart: dict[str, tuple[str, int, slice]] = {}
        for name in sorted(super().names):
            place, found, part = name.rpartition(".experts.")
            if not found or part not in _STACKED:
                continue
            count, rows, _ = super().shape(name)
            size = rows // len(_STACKED[part])
            for expert in range(count):
                for i, own in enumerate(_STACKED[part]):
                    key = f"{place}.experts.{expert}.{own}.weight"
                    self._apart[key] = name, expert, slice(i * size, (i + 1) * size)

    @property
    def names(self) -> set[str]:
        stacked = {name for name, _, _ in self._apart.values()}
        return (super().names - stacked) | self._apart.keys()

    def shape(self, name: str) -> torch.Size:
        if name not in self._apart:
            return super().shape(name)
        stored, _, rows = self._apart[name]
        return torch.Size((rows.stop - rows.start, super().shape(stored)[2]))

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        if name not in self._apart:
            return super().read(name, region)
        stored, expert, rows = self._apart[name]
        box = (slice(expert, expert + 1), rows, slice(0, self.shape(name)[1]))
        return super().read(stored, box)[0][region or ()]


def listed(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
