"""Passes of a tiny model on a CPU, each as one call of a graph that torch traced from the model.

Such a pass is hundreds of operations that take microseconds each. Called one by one from Python they take
much longer, and each of them lets go of the interpreter lock, which the thread that serves HTTP then keeps
for a while. A traced pass is one call, and computes without the lock.

A graph is used only where it gives the very numbers that the model gives, for other numbers of rows and
pages too. Weights and pool are those of the model: values may change in place, and whoever moves either
makes a new `TracedPasses`.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slime.engines.embedded.attention import BatchPlan, DecodeGroup, KVPool
from slime.engines.embedded.sampler import PlainDraw, draw_plainly

logger = logging.getLogger(__name__)
Forward = Callable[[BatchPlan], Tensor]
_TINY_BYTES = 4 << 20  # of all weights; in larger models the operations themselves take the time


def gains(model: nn.Module) -> bool:
    """Whether a pass of it is so short that calling it counts."""
    own = list(model.parameters())
    return all(p.is_cpu for p in own) and sum(p.nbytes for p in own) <= _TINY_BYTES


class _Traced:
    """A function of tensors as a graph, which was tried on two sets of them; raises where it cannot be."""

    def __init__(self, function: Any, given: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that become constants: these are found here
            self._graph: Any = torch.jit.trace(function, given, check_trace=False)
        for tried in (given, others):
            pairs = zip(_tuple(self(*tried)), _tuple(function(*tried)), strict=True)
            if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs):
                raise ValueError("the graph gives other numbers than the model")

    def __call__(self, *inputs: Tensor) -> Any:
        # As it stands: to make it faster for the sizes of one pass takes longer than many passes.
        with torch.jit.optimized_execution(False):
            return self._graph(*inputs)


class TracedPasses:
    """`forward` computes a plan with that model and pool."""

    def __init__(self, model: nn.Module, pool: KVPool, forward: Forward) -> None:
        self._module = _Pass(model, pool, forward)
        self._pass: _Traced | None = None
        self.draw: PlainDraw = draw_plainly

    def run(self, plan: BatchPlan) -> Tensor | None:
        """Logits of a pass that is one decode group; None: this model cannot be traced."""
        inputs = _inputs(plan)
        if self._pass is None:
            try:
                self._trace(inputs)
            except Exception as error:
                logger.info("passes are not traced: %s: %s", type(error).__name__, error)
                return None
        assert self._pass is not None, "it was traced"
        logits: Tensor = self._pass(*inputs)
        return logits

    def _trace(self, inputs: tuple[Tensor, ...]) -> None:
        self._pass = _Traced(self._module, inputs, _doubled(*inputs))
        logits = self._pass(*inputs)
        u = torch.linspace(0.1, 0.9, len(logits), dtype=torch.float64)
        self.draw = _Traced(draw_plainly, (logits, u), (logits.repeat(2, 1), u.repeat(2)))


class _Pass(nn.Module):
    """A pass as a function of tensors alone."""

    def __init__(self, model: nn.Module, pool: KVPool, forward: Forward) -> None:
        super().__init__()
        self.model, self._compute = model, forward
        for name, tensors in (("keys", pool.keys), ("values", pool.values)):
            for layer, tensor in tensors.items():  # known to the graph by their place, not as constants
                self.register_buffer(f"{name}_{layer}", tensor, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, positions, write_rows, logit_index, blocks, mask = inputs
        group = DecodeGroup(0, ids.shape[1], blocks, mask)
        return self._compute(BatchPlan(ids, positions, write_rows, logit_index, (group,), ()))


def _inputs(plan: BatchPlan) -> tuple[Tensor, ...]:
    group = plan.decode[0]
    assert isinstance(group, DecodeGroup), "pages are read in place on GPUs only"
    return plan.token_ids, plan.positions, plan.write_rows, plan.logit_index, group.blocks, group.mask


def _doubled(
    ids: Tensor, positions: Tensor, rows: Tensor, index: Tensor, blocks: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    """Every row twice, and one more page that nobody sees: it writes what a pass of these writes."""
    count = ids.shape[1]
    pages = nn.functional.pad(blocks.view(count, -1), (0, 1)).repeat(2, 1).view(-1)
    page = mask.shape[-1] * count // blocks.numel()
    wider = nn.functional.pad(mask, (0, page), value=float("-inf")).repeat(2, 1, 1, 1)
    both = torch.cat((index, index + count))
    return ids.repeat(1, 2), positions.repeat(1, 2), rows.repeat(2), both, pages, wider


def _tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
