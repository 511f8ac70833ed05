"""Matrices as a CPU's library multiplies with them: a packed copy, made once for all passes of some weights.

A product of a few rows, as decoding has them, takes half the time that it takes with the matrix as it is
stored, where the library packs it anew each time, or reads it badly. The copies need as much memory as the
matrices; small ones gain nothing, and those of 16 bits the library packs for itself.
"""

import functools

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LARGE_MATRIX = 1 << 16
_MEMORY_SHARE = 0.25  # of what is free on the machine: larger models stay as they are stored
_PACKED_FOR = 48  # rows; for one or two the library would leave a matrix as it is
_TRIED_ROWS = (1, 5, 96)
_SAME = 1e-5  # relative; what two orders of adding may differ by, in float32


class PackedMatrices:
    """Copies of a model's large float32 matrices; none where torch comes without Intel's library.

    A matrix that was written to is packed again by the next product.
    """

    def __init__(self, model: nn.Module):
        self.any = False  # some products are computed with copies
        self._packed: dict[nn.Linear, tuple[int, Tensor]] = {}  # with how often the weight had been written
        layers = [m for m in model.modules() if type(m) is nn.Linear and _gains(m.weight)]
        size = sum(layer.weight.nbytes for layer in layers)
        if not torch.backends.mkl.is_available() or size > _MEMORY_SHARE * psutil.virtual_memory().available:
            return
        one_of_each = {tuple(layer.weight.shape): layer for layer in layers}
        right = {shape: self._is_right(layer) for shape, layer in one_of_each.items()}
        for layer in layers:
            if right[tuple(layer.weight.shape)]:
                self.any = True
                layer.forward = functools.partial(self._multiply, layer)  # type: ignore[method-assign]

    def forget(self) -> None:
        """Give their memory back."""
        self._packed.clear()

    def _multiply(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        written, packed = self._packed.get(layer, (-1, None))
        if packed is None or written != layer.weight._version:
            packed = None
            self._packed.pop(layer, None)  # its memory is that of the next
            packed = torch.ops.mkl._mkl_reorder_linear_weight(layer.weight.detach(), _PACKED_FOR)
            self._packed[layer] = layer.weight._version, packed
        # Told that it was packed for this many rows, torch takes the copy, which is as right for any number.
        count = rows.numel() // layer.in_features
        product: Tensor = torch.ops.mkl._mkl_linear(rows, packed, layer.weight, layer.bias, count)
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
