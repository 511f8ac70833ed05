"""Runs micro-batches through Megatron's schedules: a plain loop, a pipeline, an interleaved one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.backends.base import Layout, MicroBatch, TokenOutputs
from slime.backends.megatron.modules.model import ModelCall, PackedGPTModel
from slime.backends.megatron.modules.routing import RoutingPlan, build_routes
from slime.backends.megatron.stream import PackedStream, build_stream
from slime.backends.shared.microbatch import check_routed_experts, empty_micro_batch

LossOf = Callable[[TokenOutputs, MicroBatch], Tensor]
_OWN_CHOICE = RoutingPlan()


class Passes:
    """Runs the passes of one rank; all ranks of a replica are given the same micro-batches."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel | PackedGPTModel],
        config: TransformerConfig,
        rotary: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        after_token: bool = False,
    ) -> None:
        self._chunks, self._config, self._rotary = list(chunks), config, rotary
        self._layout, self._device = layout, device
        # The all-gather dispatcher needs equally many tokens on all ranks that share experts.
        gathers = config.moe_token_dispatcher_type == "allgather" and config.expert_model_parallel_size > 1
        self._equal_over = parallel_state.get_expert_tensor_and_model_parallel_group() if gathers else None
        self._after_token = after_token  # the head reads a response token itself, not the token before it

    def forward(
        self, mbs: list[MicroBatch], call: ModelCall, routing: RoutingPlan = _OWN_CHOICE
    ) -> list[dict[str, Tensor]] | None:
        """Return the last stage's results per micro-batch, on CPU; None on all other pipeline stages."""
        results: list[dict[str, Tensor]] = []

        def keep(out: TokenOutputs, mb: MicroBatch) -> Tensor:
            results.append(out.on_cpu())
            return torch.zeros((), device=self._device)

        self._run(mbs, call, keep, routing, forward_only=True)
        return results[: len(mbs)] or None

    def backward(
        self, mbs: list[MicroBatch], call: ModelCall, loss_of: LossOf, routing: RoutingPlan = _OWN_CHOICE
    ) -> None:
        """Add the gradients of the sum of all micro-batches' losses, over all ranks."""
        self._run(mbs, call, loss_of, routing, forward_only=False)

    def _run(
        self,
        mbs: list[MicroBatch],
        call: ModelCall,
        loss_of: LossOf,
        routing: RoutingPlan,
        *,
        forward_only: bool,
    ) -> None:
        if routing.follow_engine:
            config = self._config
            for mb in mbs:
                if mb.positions:
                    check_routed_experts(
                        mb, config.num_layers, config.moe_router_topk, config.num_moe_experts
                    )
        # Interleaved stages need whole groups of micro-batches.
        missing = -len(mbs) % self._layout.pp_size if len(self._chunks) > 1 else 0
        padded = mbs + [empty_micro_batch(mbs[0].tokens)] * missing

        # All inputs are copied before the schedule, in which the host never waits for the device.
        moved = [mb.to(self._device) for mb in padded]
        sent = [[(mb, self._stream(mb, routing)) for mb in moved] for _ in self._chunks]

        def forward_step(
            iterator: Iterator[tuple[MicroBatch, PackedStream]],
            chunk: DistributedDataParallel | PackedGPTModel,
            *extra: Any,
        ) -> tuple[Tensor | TokenOutputs, Callable[..., Any]]:
            mb, stream = next(iterator)
            out = chunk(stream, call, mb)
            # With three values, the second a token count, Megatron does not scale the loss.
            return out, lambda outputs: (loss_of(outputs, mb), torch.zeros((), dtype=torch.int), {})

        iterators = [iter(inputs) for inputs in sent]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(padded),
            # Stages exchange the shape of every tensor: packed micro-batches differ in length.
            seq_length=max(mb.input_ids.shape[1] for mb in padded),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _stream(self, mb: MicroBatch, routing: RoutingPlan) -> PackedStream:
        stream = build_stream(
            mb,
            self._rotary,
            cp_size=self._layout.cp_size,
            cp_rank=self._layout.cp_rank,
            token_multiple=self._layout.tp_size if self._config.sequence_parallel else 1,
            after_token=self._after_token,
            equal_over=self._equal_over,
        )
        if self._config.num_moe_experts is not None:
            split = self._config.sequence_parallel
            tp = (self._layout.tp_size, self._layout.tp_rank) if split else (1, 0)
            stream.routes = build_routes(mb, stream, self._config, routing, tp)
        return stream
