"""Packed copies of large matrices, in the layout that a CPU's matrix library multiplies with.

A product with few rows, as in decoding, takes half the time, because the library would otherwise pack the
matrix again for each call. The copies need as much memory as the matrices. Small matrices gain nothing, and
16-bit matrices are packed by the library itself.
"""

import functools

import psutil
import torch
from torch import Tensor, nn

_LARGE_MATRIX = 1 << 16
_MEMORY_SHARE = 0.25  # share of the machine's free memory: larger models are not packed
_PACKED_FOR = 48  # rows; for one or two the library does not pack a matrix


class PackedMatrices:
    """Packed copies of a model's large float32 matrices; empty if torch was built without Intel's MKL.

    A matrix that has changed is packed again by the next product.
    """

    def __init__(self, model: nn.Module):
        self._packed: dict[nn.Linear, tuple[int, Tensor]] = {}  # with the version of the weight
        layers = [m for m in model.modules() if type(m) is nn.Linear and _gains(m.weight)]
        size = sum(layer.weight.nbytes for layer in layers)
        if not torch.backends.mkl.is_available() or size > _MEMORY_SHARE * psutil.virtual_memory().available:
            return
        for layer in layers:
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
        # torch accepts the copy only for the number of rows that it was packed for; the copy is valid for
        # any.
        count = rows.numel() // layer.in_features
        product: Tensor = torch.ops.mkl._mkl_linear(rows, packed, layer.weight.detach(), layer.bias, count)
        return product


def _gains(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _LARGE_MATRIX
