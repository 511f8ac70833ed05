"""Tagged copies of a model's weights (ref, old, ...) that can take the live model's place for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slime.utils.machine.accelerator import gpu

LIVE = "actor"
OLD_POLICIES = NEWEST, BEFORE = "rollout", "old"  # with --keep-old-actor: the weights of the last two pushes


class WeightCopies:
    """Copies of the local shards, in host memory. The tag "actor" is the live model."""

    def __init__(self, local_tensors: Callable[[], list[Tensor]]) -> None:
        self._live = local_tensors
        self._copies: dict[str, list[Tensor]] = {}

    def __contains__(self, tag: str) -> bool:
        return tag == LIVE or tag in self._copies

    @torch.no_grad()
    def copy(self, src: str, dst: str) -> None:
        """Set `dst` to `src`."""
        if src == dst:
            return
        source = self._tensors(src)
        if dst != LIVE and dst not in self._copies:
            # Pinned on GPU machines, so that swapping runs at bus speed.
            pinned = gpu.is_available()
            self._copies[dst] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in source]
        for target, value in zip(self._tensors(dst), source, strict=True):
            target.copy_(value, non_blocking=True)
        if gpu.is_available():
            gpu.synchronize()

    @contextmanager
    def active(self, tag: str) -> Iterator[None]:
        """Put the weights of `tag` into the live model within the block, then restore its own."""
        if tag == LIVE:
            yield
            return
        self._tensors(tag)
        self.copy(LIVE, "_own")
        try:
            self.copy(tag, LIVE)
            yield
        finally:
            self.copy("_own", LIVE)

    @contextmanager
    def filling(self, tag: str) -> Iterator[None]:
        """Store what the block writes into the live model under `tag`, then restore the live model."""
        if tag == LIVE:
            yield
            return
        self.copy(LIVE, "_own")
        try:
            yield
            self.copy(LIVE, tag)
        finally:
            self.copy("_own", LIVE)

    def _tensors(self, tag: str) -> list[Tensor]:
        if tag == LIVE:
            return self._live()
        if tag not in self._copies:
            known = ", ".join([LIVE, *self._copies])
            raise ValueError(f"no weights are kept under {tag!r}; there are {known}.")
        return self._copies[tag]
