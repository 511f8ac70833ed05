"""Matrices as a CPU's library multiplies with them: a packed copy, made once for all passes of some weights.

A product of a few rows, as decoding has them, takes half the time that it takes with the matrix as it is
stored, where the library packs it anew each time, or reads it badly. The copies need as much memory as the
matrices; small ones gain nothing, and those of 16 bits the library packs for itself.

Matrices that one input is multiplied with in turn, as those of queries, keys and values, are one matrix: the
first call computes all of their products, and the others take theirs. Threads then meet less often.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LARGE_MATRIX = 1 << 16
_MEMORY_SHARE = 0.25  # of what is free on the machine: larger models stay as they are stored
_PACKED_FOR = 48  # rows; for one or two the library would leave a matrix as it is
_TRIED_ROWS = (1, 5, 96)
_SAME = 1e-5  # relative; what two orders of adding may differ by, in float32
_IN_TURN = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """The weights of some layers, one behind the other in memory."""

    layers: tuple[nn.Linear, ...]
    weight: Tensor

    @classmethod
    def of(cls, layers: tuple[nn.Linear, ...]) -> "_Matrix":
        if len(layers) == 1:
            return cls(layers, layers[0].weight.detach())
        joined = torch.cat([layer.weight.detach() for layer in layers])
        parts = joined.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part
        return cls(layers, joined)

    @property
    def written(self) -> list[int]:
        """How often each of its weights has been written."""
        return [layer.weight._version for layer in self.layers]


class PackedMatrices:
    """Copies of a model's large float32 matrices; none where torch comes without Intel's library.

    A matrix that was written to is packed again by the next product.
    """

    def __init__(self, model: nn.Module):
        self.any = False  # some products are computed with copies
        self._packed: dict[_Matrix, tuple[list[int], Tensor]] = {}  # with how often it had been written
        layers = [m for m in model.modules() if type(m) is nn.Linear and _gains(m.weight)]
        size = sum(layer.weight.nbytes for layer in layers)
        if not torch.backends.mkl.is_available() or size > _MEMORY_SHARE * psutil.virtual_memory().available:
            return
        right: dict[torch.Size, bool] = {}
        for members in _in_turn(model, layers):
            matrix = _Matrix.of(members)
            shape = matrix.weight.shape
            if shape not in right:
                right[shape] = self._is_right(matrix)
            if right[shape]:
                self.any = True
                self._use(matrix)

    def forget(self) -> None:
        """Give their memory back."""
        self._packed.clear()

    def _use(self, matrix: _Matrix) -> None:
        first, *others = matrix.layers
        if not others:
            first.forward = functools.partial(self._multiply, matrix)  # type: ignore[method-assign]
            return
        sizes = [layer.out_features for layer in matrix.layers]
        waiting: list[tuple[Tensor, dict[nn.Linear, Tensor]]] = []  # the last input, and what is not taken

        def begin(rows: Tensor) -> Tensor:
            made = self._multiply(matrix, rows).split(sizes, dim=-1)
            waiting[:] = [(rows, dict(zip(others, made[1:], strict=True)))]
            return made[0]

        def take(layer: nn.Linear, rows: Tensor) -> Tensor:
            if waiting and waiting[0][0] is rows and layer in waiting[0][1]:
                made = waiting[0][1].pop(layer)
                if not waiting[0][1]:
                    waiting.clear()
                return made
            return linear(rows, layer.weight)

        first.forward = begin  # type: ignore[method-assign, assignment]
        for layer in others:
            layer.forward = functools.partial(take, layer)  # type: ignore[method-assign]

    def _multiply(self, matrix: _Matrix, rows: Tensor) -> Tensor:
        written, packed = self._packed.get(matrix, ([], None))
        if packed is None or written != matrix.written:
            packed = None
            self._packed.pop(matrix, None)  # its memory is that of the next
            packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix.weight, _PACKED_FOR)
            self._packed[matrix] = matrix.written, packed
        # Told that it was packed for this many rows, torch takes the copy, which is as right for any number.
        count, bias = rows.numel() // matrix.weight.shape[1], matrix.layers[0].bias
        product: Tensor = torch.ops.mkl._mkl_linear(rows, packed, matrix.weight, bias, count)
        return product

    @torch.inference_mode()
    def _is_right(self, matrix: _Matrix) -> bool:
        generator = torch.Generator().manual_seed(0)
        for count in _TRIED_ROWS:
            rows = torch.randn(count, matrix.weight.shape[1], generator=generator)
            try:
                made = self._multiply(matrix, rows)
            except (AttributeError, RuntimeError):  # a torch without these operators
                return False
            expected = linear(rows, matrix.weight, matrix.layers[0].bias)
            if made.shape != expected.shape or (made - expected).norm() > _SAME * expected.norm():
                return False
        return True


def _in_turn(model: nn.Module, layers: list[nn.Linear]) -> Iterable[tuple[nn.Linear, ...]]:
    """All of the layers, with those together that are multiplied with in turn."""
    left = dict.fromkeys(layers)
    for module in model.modules():
        children = dict(module.named_children())
        for names in _IN_TURN:
            found = [layer for layer in map(children.get, names) if isinstance(layer, nn.Linear)]
            members = tuple(layer for layer in found if layer in left and layer.bias is None)
            if len(members) == len(names) and len({layer.in_features for layer in members}) == 1:
                yield members
                for layer in members:
                    del left[layer]
    for layer in left:
        yield (layer,)


def _gains(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _LARGE_MATRIX
