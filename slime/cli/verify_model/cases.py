"""The documents that every trainer computes, and the outcome: outputs and weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slime.backends.base import Denominators, Loss, MicroBatch, TokenOutputs
from slime.utils.types import RolloutBatch

LEARNING_RATE = 0.05
# (prompt, response) tokens of each document: ragged, odd, one of two tokens.
_DOCUMENTS = ((5, 9), (1, 1), (3, 16), (8, 5), (2, 7), (11, 3))
NUM_DOCUMENTS = len(_DOCUMENTS)
DENOMINATORS = Denominators(rollouts=1, tokens=1.0, samples=1)


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The outcome of one trainer; weights before and after one step of SGD have hub names."""

    log_probs: list[Tensor]  # [R_i] by document
    entropy: list[Tensor]
    loss: float
    grad_norm: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of a transformers model; else empty


def buffers_of(lm: nn.Module) -> dict[str, Tensor]:
    """Copy all buffers of a model, non-persistent ones included."""
    return {name: buffer.detach().cpu().clone() for name, buffer in lm.named_buffers()}


def documents(vocabulary: int, chosen: Sequence[int] = range(NUM_DOCUMENTS)) -> RolloutBatch:
    """Return random tokens, with a random weight (as advantage) for every response token."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, vocabulary, (p + r,), generator=generator) for p, r in _DOCUMENTS]
    weights = [torch.randn(response, generator=generator) for _, response in _DOCUMENTS]
    responses = [_DOCUMENTS[i][1] for i in chosen]
    return RolloutBatch(
        tokens=[tokens[i] for i in chosen],
        response_lengths=responses,
        loss_masks=[torch.ones(n) for n in responses],
        rollout_mask_sums=[float(n) for n in responses],
        advantages=[weights[i] for i in chosen],
        rewards=[0.0] * len(chosen),
        raw_reward=[0.0] * len(chosen),
        rollout_ids=list(chosen),
        sample_indices=list(chosen),
        truncated=[0] * len(chosen),
    )


def linear_loss() -> Loss:
    """Return a weighted sum of log-probs, whose gradient reaches every parameter."""

    def compute(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value = (mb.tokens["advantages"] * mb.loss_mask * out.log_probs).sum()
        return value, {"loss": value.detach()}

    return Loss(compute)
