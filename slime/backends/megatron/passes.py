"""Micro-batches through Megatron's schedules: the same call is a plain loop, a pipeline or an interleaved pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.backends.base import Layout, MicroBatch, TokenOutputs
from slime.backends.megatron.stream import PackedStream, build_stream
from slime.backends.microbatch import build_micro_batch

LossOf = Callable[[TokenOutputs, MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What the last stage is asked to compute."""

    temperature: float
    chunk_size: int
    entropy: bool
    logits: bool


class Passes:
    """Runs passes of one rank. All ranks of a replica are given the same micro-batches."""

    def __init__(
        self,
        chunks: list[nn.Module],
        config: TransformerConfig,
        rotary: nn.Module,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._chunks, self._config, self._rotary = chunks, config, rotary
        self._layout, self._device = layout, device

    def forward(self, mbs: list[MicroBatch], call: ModelCall) -> list[tuple[Tensor, Tensor | None]] | None:
        """Log-probs [R] and entropies [R] of each micro-batch on CPU; None on all pipeline stages but the last."""
        results: list[tuple[Tensor, Tensor | None]] = []

        def keep(out: TokenOutputs, mb: MicroBatch) -> Tensor:
            entropy = out.entropy.cpu() if out.entropy is not None else None
            results.append((out.log_probs.cpu(), entropy))
            return out.log_probs.new_zeros(())

        self._run(mbs, call, keep, forward_only=True)
        return results[: len(mbs)] or None

    def backward(self, mbs: list[MicroBatch], call: ModelCall, loss_of: LossOf) -> None:
        """Adds the gradients of the sum of all micro-batches' losses, over all ranks."""
        self._run(mbs, call, loss_of, forward_only=False)

    def _run(self, mbs: list[MicroBatch], call: ModelCall, loss_of: LossOf, *, forward_only: bool) -> None:
        padded = mbs + [_weight_zero(mbs[0])] * self._missing(len(mbs))

        def forward_step(iterator: Iterator[MicroBatch], chunk: nn.Module, *extra: Any) -> tuple[Any, Callable]:
            mb = next(iterator).to(self._device)
            out = chunk(
                self._stream(mb),
                temperature=call.temperature,
                chunk_size=call.chunk_size,
                entropy=call.entropy,
                logits=call.logits,
            )
            # Three values, the second a token count, is how Megatron leaves a loss as it is.
            return out, lambda outputs: (loss_of(outputs, mb), torch.zeros((), dtype=torch.int), {})

        iterators = [iter(padded) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(padded),
            # Stages tell each other the shape of every tensor: packed micro-batches differ in length.
            seq_length=max(mb.input_ids.shape[1] for mb in padded),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _missing(self, count: int) -> int:
        """Micro-batches of weight zero to add: interleaved stages take them in whole groups."""
        return -count % self._layout.pp_size if len(self._chunks) > 1 else 0

    def _stream(self, mb: MicroBatch) -> PackedStream:
        return build_stream(
            mb,
            self._rotary,
            cp_size=self._layout.cp_size,
            cp_rank=self._layout.cp_rank,
            token_multiple=self._layout.tp_size if self._config.sequence_parallel else 1,
        )


def _weight_zero(like: MicroBatch) -> MicroBatch:
    return build_micro_batch({}, [], list(like.tokens))
