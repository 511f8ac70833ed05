"""The weights of a Hugging Face folder or hub id, read one tensor at a time."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.utils.files.safetensors_files import files_by_tensor


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
                f"{self.path} holds no model.safetensors and no index of several: the Megatron backend reads "
                "safetensors; save the model again with save_pretrained."
            )
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "CheckpointFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open  # with transformers, only needed here

        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        tensor = self._open[file].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} in {self.path} is {tensor.dtype}: quantised checkpoints cannot be trained; use the "
                "16- or 32-bit one."
            )
        return tensor
