"""Types in the interface of a trainer: layout, micro-batches, outputs, losses, results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.documents import PackedDocuments, move_fields
from slime.utils.errors import RunStopped

Metrics = dict[str, Tensor]  # scalar sums over the micro-batch, detached
Bucket = list[tuple[str, Tensor]]  # hub names


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions and this rank's place in them."""

    dp_size: int = 1
    dp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    @property
    def place_in_stage(self) -> tuple[int, int]:
        """Return this rank's index among the ranks of its pipeline stage, and their number."""
        index = (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
        return index, self.dp_size * self.cp_size * self.tp_size

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this is the first rank of its pipeline stage; experts are spread over the stage's other
        ranks.
        """
        return self.dp_rank == self.cp_rank == self.tp_rank == 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Several samples packed one after another without padding: T tokens, S samples, R response tokens.

    Example: samples with tokens [5, 6, 7] (2 of them response) and [8, 9] (1): input_ids = [[5, 6, 7, 8, 9]],
    position_ids = [[0, 1, 2, 0, 1]], logit_positions = [0, 1, 3], targets = [6, 7, 9], segments = [0, 0, 1].
    """

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, restarting with each sample
    documents: PackedDocuments
    logit_positions: Tensor  # [R] position in the stream of each response token's logits
    targets: Tensor  # [R] the response tokens
    segments: Tensor  # [R] which of the S samples a response token belongs to
    loss_mask: Tensor  # [R] fp32
    rollout_mask_sums: Tensor  # [S] fp32
    positions: tuple[int, ...]  # positions in the rank's batch; empty: a micro-batch of weight zero
    response_lengths: tuple[int, ...]  # [S]
    tokens: dict[str, Tensor] = field(default_factory=dict)  # further values [R]: advantages, ...
    routed_experts: Tensor | None = (
        None  # [T, layers, topk] int32 of the engine, -1: unknown; None: no replay
    )
    nucleus: Nucleus | None = None  # R rows: the ids that the engine drew each token from; None: all ids
    # [S] what the processor made of each sample's images, or None; (): no sample has images
    media: tuple[Mapping[str, Any] | None, ...] = ()
    images: Any = None  # set by a trainer: `media` in the form of its model
    learns: bool = True  # False: its loss has a gradient of 0, and a trainer may leave the backward pass out

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    def to(self, device: torch.device) -> "MicroBatch":
        tokens = {name: value.to(device, non_blocking=True) for name, value in self.tokens.items()}
        return replace(move_fields(self, device), tokens=tokens)


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """The model's outputs for each response token of a micro-batch."""

    log_probs: Tensor  # [R] fp32, over the micro-batch's nucleus where it has one; [0] of a scalar head
    entropy: Tensor | None = None  # [R] fp32, likewise; None: not asked for
    values: Tensor | None = None  # [R] fp32 of a scalar head: a critic or a reward model; None: a policy
    logits: Tensor | None = None  # [1, T, V] fp32, before the temperature; None: the loss does not need them
    extra: Tensor | None = None  # [R, ...] what `Loss.at_head` returned

    @classmethod
    def of_scalar_head(cls, values: Tensor) -> "TokenOutputs":
        return cls(log_probs=values.new_empty(0), values=values)

    def on_cpu(self) -> dict[str, Tensor]:
        """Return the per-token outputs by name, detached, on the CPU, without the logits."""
        log_probs = self.log_probs if self.values is None else None
        found = {"log_probs": log_probs, "entropy": self.entropy, "values": self.values, "extra": self.extra}
        return {name: tensor.detach().cpu() for name, tensor in found.items() if tensor is not None}

    @classmethod
    def of_known(cls, known: dict[str, Tensor], device: torch.device) -> "TokenOutputs":
        """Rebuild from what `on_cpu` returned, on `device`."""
        moved = {name: tensor.to(device) for name, tensor in known.items()}
        return cls(**{"log_probs": torch.empty(0, device=device), **moved})


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Results of a pass without gradients: a CPU fp32 tensor [R_i] per sample, in the order of the batch."""

    log_probs: list[Tensor]
    entropy: list[Tensor] | None = None
    extra: list[Tensor] | None = None  # [R_i, ...] what `at_head` returned, in the dtype of the pass


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of the whole optimizer step, identical on all ranks."""

    rollouts: int
    tokens: float
    samples: int = 0
    per: str = "rollouts"  # which of the counts divides the sums

    @property
    def value(self) -> float:
        return max(float(getattr(self, self.per)), 1.0)


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Position of an optimizer step in the run."""

    rollout_id: int
    step_id: int  # from 0 in the rollout


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and what it needs from the model."""

    fn: Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Metrics]]  # returns sums, never means
    needs_entropy: bool = False
    needs_logits: bool = False
    at_head: "HeadFunction | None" = None  # its result comes back as TokenOutputs.extra
    masked: bool = True  # False: the loss ignores loss masks, and trains all tokens


class OutputMatrix(Protocol):
    """The output projection, as this rank holds it: the whole matrix, or some of its rows."""

    @property
    def weight(self) -> Tensor:
        """Return [V, H], or this rank's part of the V rows."""
        ...

    def reverse_kl(
        self, hidden: Tensor, teacher_hidden: Tensor, teacher: Self, *, temperature: float, chunk_size: int
    ) -> Tensor:
        """Return [R] KL(own || teacher) over the vocabulary, the same on all ranks; differentiable in the
        own.
        """
        ...

    def log_probs_of(self, hidden: Tensor, ids: Tensor, *, temperature: float, chunk_size: int) -> Tensor:
        """Return [R, K] log-probs of `ids` [R, K], the same on all ranks; differentiable."""
        ...


# Runs next to the output matrix, on the hidden states [R, H] that predict the response tokens.
HeadFunction = Callable[[Tensor, OutputMatrix, MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step: metrics already divided by the denominators and the same on all ranks."""

    metrics: dict[str, float]
    grad_norm: float
    learning_rates: tuple[float, ...]  # per parameter group
    optimizer_s: float = 0.0  # host seconds of the optimizer itself, after the last backward pass
    applied: bool = True  # False: there was nothing to apply, weights and optimizer are as before
    loss_scale: float | None = None  # in fp16
    overflowed: bool = False  # not applied, because the gradient overflowed in fp16


# Metric of losses that can leave out tokens: the number of tokens left. 0: nothing trains.
TOKENS_LEFT = "_tokens_left"


def has_update(loss: Loss, denominators: Denominators, metrics: dict[str, float], grad_norm: float) -> bool:
    """Return whether some token trains in a step.

    If none does, weights, moments and the schedule stay: weight decay and momentum would move the policy
    without a reason. A gradient of zero alone is an ordinary update: tokens may train with an advantage of 0.
    """
    if denominators.tokens == 0 and loss.masked:
        return False
    return grad_norm > 0 or metrics.get(TOKENS_LEFT) != 0


class NonFiniteStepError(RunStopped, ArithmeticError):
    """The loss or the gradient norm of a step is NaN or infinite; the step was not applied."""
