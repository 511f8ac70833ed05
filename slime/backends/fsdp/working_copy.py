"""A 16-bit copy of fp32 weights for the passes of a single trainer rank, where nothing is sharded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from slime.backends.shared.gradient_sums import add_gradient_


class WorkingCopy:
    """Replaces the model's parameters by `dtype` copies during passes; gradients add up in fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        masters: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                masters.setdefault(parameter, []).append((module, name))
        self._places = masters
        self._copies: dict[nn.Parameter, nn.Parameter] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute in 16 bit within the block, with the fp32 weights' values at its start."""
        self._refresh()
        try:
            self._place(self._copies)
            yield
        finally:
            self._place({master: master for master in self._places})

    def drop(self) -> None:
        """Free the copy; the next pass makes a new one."""
        self._copies = {}

    @torch.no_grad()
    def _refresh(self) -> None:
        if not self._copies:
            self._copies = {master: self._copy_of(master) for master in self._places}
        torch._foreach_copy_(list(self._copies.values()), list(self._places))

    def _copy_of(self, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype), requires_grad=master.requires_grad)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(lambda copy: _add_gradient(master, copy))
        return copy

    def _place(self, chosen: dict[nn.Parameter, nn.Parameter]) -> None:
        for master, places in self._places.items():
            for module, name in places:
                module._parameters[name] = chosen[master]


def _add_gradient(master: nn.Parameter, copy: nn.Parameter) -> None:
    assert copy.grad is not None, "called when the copy has its gradient"
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        add_gradient_(master.grad, copy.grad)
    copy.grad = None
