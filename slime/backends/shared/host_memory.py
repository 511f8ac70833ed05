"""Host memory for what leaves a device: page-locked once, then used again and again.

Fresh pageable memory would be faulted in page by page, which takes ten times as long as the copy itself.
Shards of several ranks (DTensors) still go that way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_BLOCK_BYTES = 1 << 30  # torch rounds page-locked memory up to a power of two, so tensors share blocks of one
_ALIGNMENT = 256


class HostMemory:
    """A place in host memory for every tensor that was there before, by its key."""

    def __init__(self) -> None:
        self._places: dict[Any, Tensor] = {}
        self._block: Tensor | None = None  # what is left of the newest block

    def move_model(self, model: nn.Module, place: torch.device) -> None:
        """Like `model.to(place)`."""
        model._apply(
            lambda tensor: self.move(tensor if isinstance(tensor, nn.Parameter) else None, tensor, place)
        )

    def move_state(self, optimizer: torch.optim.Optimizer, place: torch.device) -> None:
        """Every tensor of the optimizer's state."""
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = self.move((parameter, name), value, place)

    def move(self, key: Any, tensor: Tensor, place: torch.device) -> Tensor:
        if tensor.device.type == place.type:
            return tensor
        if place.type != "cpu" or key is None or isinstance(tensor, DTensor):
            return tensor.to(place, non_blocking=place.type != "cpu")
        return self.keep(key, tensor)

    @torch.no_grad()
    def keep(self, key: Any, tensor: Tensor) -> Tensor:
        """A copy in host memory, in this key's place; from a GPU it is there after a synchronisation."""
        return self.place(key, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def place(self, key: Any, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for such a tensor, with whatever this key's place holds."""
        place = self._places.get(key)
        if place is None or place.shape != shape or place.dtype != dtype:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            place = self._places[key] = self._carve(nbytes).view(dtype).view(shape)
        return place

    def _carve(self, nbytes: int) -> Tensor:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > _BLOCK_BYTES:
            return _locked(size)[:nbytes]
        if self._block is None or self._block.numel() < size:
            self._block = _locked(_BLOCK_BYTES)
        taken, self._block = self._block[:nbytes], self._block[size:]
        return taken


def _locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
