"""Records which experts each token was sent to, so that training can send it to the same ones."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slime.algorithms.model_parts import decoder_layers, routers

_FLAG = "--use-rollout-routing-replay"


class ExpertRecord:
    """Chosen experts by row of the KV pool: whoever shares a page of keys shares its choices.

    `chosen` is [rows, layers, top k]; layers without experts stay 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self._write_rows: Tensor | None = None
        layers = decoder_layers(model)
        found = [(number, router) for number, layer in enumerate(layers) for router in routers(layer)]
        if not found:
            raise ValueError(
                f"{_FLAG}: {type(model).__name__} has no routers that choose experts; leave it out."
            )
        self._num_layers, self._top_k = len(layers), found[0][1].top_k
        for number, router in found:
            router.register_forward_hook(functools.partial(self._note, number))
        self.chosen = torch.empty(0)

    def allocate(self, rows: int, device: torch.device) -> None:
        shape = rows, self._num_layers, self._top_k
        self.chosen = torch.zeros(shape, dtype=torch.int16, device=device)

    def follow(self, write_rows: Tensor) -> None:
        """Record the next pass, whose tokens have their keys in these rows of the pool."""
        self._write_rows = write_rows

    def _note(self, number: int, router: nn.Module, _inputs: Any, output: Any) -> None:
        chosen = output[-1] if isinstance(output, tuple) else None
        if chosen is None or chosen.dtype != torch.int64:
            raise ValueError(f"{_FLAG}: {type(router).__name__} does not say which experts it chose.")
        if self._write_rows is not None:  # None: the pass that measures the shapes of keys
            self.chosen[self._write_rows, number] = chosen.to(torch.int16)

    def of(self, blocks: Sequence[int], block_size: int, known: int, count: int) -> np.ndarray:
        """Return int32 [count, layers, top k] of a sequence's tokens; -1 after the first `known` ones."""
        pages = self.chosen.view(-1, block_size, self._num_layers, self._top_k)
        held = pages[torch.tensor(blocks, dtype=torch.int64, device=pages.device)].flatten(0, 1)[:known]
        result = np.full((count, self._num_layers, self._top_k), -1, np.int32)
        result[:known] = held[:count].cpu().numpy()
        return result
