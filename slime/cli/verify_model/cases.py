"""The documents that all trainers are given, and what each hands back:
outputs, weights and activations by hub name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime.backends.base import Denominators, Loss, MicroBatch, TokenOutputs

LEARNING_RATE = 0.05
# (prompt, response) tokens of each document: ragged, odd, one of two tokens.
_DOCUMENTS = ((5, 9), (1, 1), (3, 16), (8, 5), (2, 7), (11, 3))
DENOMINATORS = Denominators(rollouts=1, tokens=1.0, samples=1)

# (document, layer, part of the layer) -> [tokens, hidden]
Activations = dict[tuple[int, int, str], Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trainer computed. Weights are under hub names; `before` and `after` one step of SGD."""

    log_probs: list[Tensor]  # [R_i] by document
    entropy: list[Tensor]
    loss: float
    grad_norm: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    activations: Activations = field(default_factory=dict)


def documents(vocabulary: int, seed: int = 0) -> dict[str, list[Any]]:
    """A batch of random tokens with a random weight for the log-prob of every response token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocabulary, (p + r,), generator=generator) for p, r in _DOCUMENTS]
    responses = [response for _, response in _DOCUMENTS]
    return {
        "tokens": tokens,
        "response_lengths": responses,
        "loss_masks": [torch.ones(n) for n in responses],
        "rollout_mask_sums": [float(n) for n in responses],
        "advantages": [torch.randn(n, generator=generator) for n in responses],
        "sample_indices": list(range(len(tokens))),
    }


def take(batch: dict[str, list[Any]], chosen: Sequence[int]) -> dict[str, list[Any]]:
    return {name: [values[i] for i in chosen] for name, values in batch.items()}


def linear_loss() -> Loss:
    """The weighted sum of log-probs: its gradient reaches every parameter,
    and nothing in it can hide a difference.
    """

    def compute(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value = (mb.tokens["advantages"] * mb.loss_mask * out.log_probs).sum()
        return value, {"loss": value.detach()}

    return Loss(compute)
