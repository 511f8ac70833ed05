"""Page-locked host memory for tensors that leave a device, allocated once and reused.

Fresh pageable memory would be faulted in page by page, which takes ten times as long as the copy itself.
"""

import math
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime.utils.machine.accelerator import gpu

BLOCK_BYTES = 1 << 30  # torch rounds page-locked memory up to a power of two, so tensors share blocks of one
_ALIGNMENT = 256
_MOST_OF_FREE = 0.7


class HostMemory:
    """Keeps a reusable host buffer for every offloaded tensor, by its key."""

    def __init__(self) -> None:
        self._places: dict[Any, Tensor] = {}
        self._block: Tensor | None = None  # free part of the newest block

    def move_model(self, model: nn.Module, place: torch.device) -> None:
        """Move the model like `model.to(place)`."""
        model._apply(
            lambda tensor: self.move(tensor if isinstance(tensor, nn.Parameter) else None, tensor, place)
        )

    def move_state(self, optimizer: torch.optim.Optimizer, place: torch.device) -> None:
        """Move every tensor of the optimizer's state."""
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = self.move((parameter, name), value, place)

    def move(self, key: Any, tensor: Tensor, place: torch.device) -> Tensor:
        if tensor.device.type == place.type:
            return tensor
        if place.type != "cpu" or key is None:
            return tensor.to(place, non_blocking=place.type != "cpu")
        if isinstance(tensor, DTensor):
            # Like `DTensor.to`: this rank's part in another place, under the mesh of its device.
            kept = self.keep(key, tensor._local_tensor)
            return DTensor(kept, tensor._spec, requires_grad=tensor.requires_grad)
        return self.keep(key, tensor)

    @torch.no_grad()
    def keep_storage(self, key: Any, storage: torch.UntypedStorage) -> None:
        """Copy all bytes of a storage to host memory; complete after a synchronisation."""
        for number, piece in enumerate(_pieces(storage)):
            self.keep((key, number), piece)

    @torch.no_grad()
    def give_back_storage(self, key: Any, storage: torch.UntypedStorage) -> None:
        """Copy what `keep_storage` stored back into a storage of the same size."""
        for number, piece in enumerate(_pieces(storage)):
            piece.copy_(self._places[key, number], non_blocking=True)

    @torch.no_grad()
    def keep(self, key: Any, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory under a key; from a GPU, it is complete after a synchronisation."""
        return self.place(key, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def place(self, key: Any, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory for such a tensor; it holds the last copy under this key."""
        place = self._places.get(key)
        if place is None or place.shape != shape or place.dtype != dtype:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            place = self._places[key] = self._carve(nbytes).view(dtype).view(shape)
        return place

    def _carve(self, nbytes: int) -> Tensor:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > BLOCK_BYTES:
            return _locked(size)[:nbytes]
        if self._block is None or self._block.numel() < size:
            self._block = _locked(BLOCK_BYTES)
        taken, self._block = self._block[:nbytes], self._block[size:]
        return taken


def _pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split(BLOCK_BYTES)


def lock_ahead(nbytes: int, block_bytes: int, between: Callable[[], object]) -> None:
    """Page-lock memory before it is needed: torch gives these blocks to the next allocations.

    Locking a gigabyte takes about half a second, in which no other thread of the process reaches the device;
    `between`, called after each block, gives others a turn. If this were most of the machine's free memory,
    nothing is locked: a later allocation then fails with its own error.
    """
    if nbytes > _MOST_OF_FREE * psutil.virtual_memory().available:
        return
    held = []
    for _ in range(math.ceil(nbytes / block_bytes)):
        held.append(_locked(block_bytes))
        between()
    held.clear()


def _locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=gpu.is_available())
