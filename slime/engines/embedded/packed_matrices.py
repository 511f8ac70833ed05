"""Packed copies of large matrices, in the layout that a CPU's matrix library multiplies with.

A product of a few rows, as decoding has them, takes half the time of one with the matrix as it is stored,
which the library packs again for each call. The copies need as much memory as the matrices. Small matrices
gain nothing, and the library packs 16-bit ones itself.
"""

import functools

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LARGE_MATRIX = 1 << 16
_MEMORY_SHARE = 0.25  # of the machine's free memory: larger models stay as they are stored
_PACKED_FOR = 48  # rows; for one or two the library would leave a matrix as it is
_TRIED_ROWS = (1, 5, 96)
_SAME = 1e-5  # relative difference that another order of adding may cause, in float32


class PackedMatrices:
    """Copies of a model's large float32 matrices; none where torch comes without Intel's library.

    A matrix that was written to is packed again by the next product.
    """

    def __init__(self, model: nn.Module):
        self._packed: dict[nn.Linear, tuple[int, Tensor]] = {}  # with the version of the weight
        layers = [m for m in model.modules() if type(m) is nn.Linear and _gains(m.weight)]
        size = sum(layer.weight.nbytes for layer in layers)
        if not torch.backends.mkl.is_available() or size > _MEMORY_SHARE * psutil.virtual_memory().available:
            return
        right: dict[torch.Size, bool] = {}
        for layer in layers:
            shape = layer.weight.shape
            if shape not in right:
                right[shape] = self._is_right(layer)
            if right[shape]:
                layer.forward = functools.partial(self._multiply, layer)  # type: ignore[method-assign]

    def forget(self) -> None:
        """Free the copies."""
        self._packed.clear()

    def _multiply(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        version, packed = self._packed.get(layer, (-1, None))
        if packed is None or version != layer.weight._version:
            packed = None
            self._packed.pop(layer, None)  # frees the memory before the next copy is made
            packed = torch.ops.mkl._mkl_reorder_linear_weight(layer.weight.detach(), _PACKED_FOR)
            self._packed[layer] = layer.weight._version, packed
        # Told that it was packed for this many rows, torch takes the copy, which is right for any number.
        count = rows.numel() // layer.in_features
        product: Tensor = torch.ops.mkl._mkl_linear(rows, packed, layer.weight.detach(), layer.bias, count)
        return product

    @torch.inference_mode()
    def _is_right(self, layer: nn.Linear) -> bool:
        generator = torch.Generator().manual_seed(0)
        for count in _TRIED_ROWS:
            rows = torch.randn(count, layer.in_features, generator=generator)
            try:
                made = self._multiply(layer, rows)
            except (AttributeError, RuntimeError):  # a torch without these operators
                return False
            expected = linear(rows, layer.weight, layer.bias)
            if made.shape != expected.shape or (made - expected).norm() > _SAME * expected.norm():
                return False
        return True


def _gains(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _LARGE_MATRIX
