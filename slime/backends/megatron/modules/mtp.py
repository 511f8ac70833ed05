"""MTP heads: Megatron's layers on the last pipeline stage, trained in addition to the policy.

An MTP (multi-token prediction) head predicts a token further ahead. It reads the model's hidden states, the
embedding and the output matrix without a gradient to them, so that the policy trains exactly as it would
without heads. Not covered: context parallelism, tied embeddings.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.base import MicroBatch
from slime.backends.megatron.modules.layer_specs import layer_spec, moe_pattern
from slime.backends.megatron.modules.layers import PackedCoreAttention, RMSNorm
from slime.backends.megatron.modules.vocab_parallel import VocabSlice, vocab_parallel_log_probs
from slime.backends.megatron.stream import PackedStream


class PackedMTPLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer, whose recomputation passes a stream on; Megatron's own supports tensors only."""

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = kwargs.pop("hidden_states"), kwargs.pop("decoder_input")

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embedded, **kwargs)

        return checkpoint(run, self.config.distribute_saved_activations, *tensors)


def mtp_spec(
    config: TransformerConfig, *, attention: type[PackedCoreAttention], branch_norms: bool = False
) -> ModuleSpec:
    """Return the spec of all MTP heads; each holds a layer of the kind of the last decoder layer."""
    layer = layer_spec(config, moe=moe_pattern(config)[-1], attention=attention, branch_norms=branch_norms)
    head = ModuleSpec(
        module=PackedMTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=RMSNorm,
        ),
    )
    heads = MultiTokenPredictionBlockSubmodules(layer_specs=[head] * config.mtp_num_layers)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=heads)


class _NoGradient(torch.autograd.Function):
    """Returns zero gradients: a parameter without any gradient would stall overlapped reductions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class AlsoTrain(torch.autograd.Function):
    """Returns the values unchanged; its backward pass also goes through a scalar loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def mtp_loss(
    model: GPTModel, hidden: Tensor, stream: PackedStream, matrix: VocabSlice, mb: MicroBatch
) -> Tensor:
    """Negative log-probs of the masked response tokens under the MTP heads: a sum, averaged over heads.

    `hidden` [T_local, 1, H] comes from the decoder. Head k (from 0) predicts a token from k + 2 places before
    it, where there is one.
    """
    assert stream.tree is None, "the backend refuses MTP heads with context parallelism"
    count = model.config.mtp_num_layers
    outputs = model.mtp(
        input_ids=stream.input_ids,
        position_ids=stream.position_ids,
        # A leaf with a gradient: recomputation trains only parameters of results that depend on one.
        hidden_states=hidden.detach().requires_grad_(),
        attention_mask=None,
        packed_seq_params=stream,
        embedding=lambda **inputs: _NoGradient.apply(model.embedding(**inputs)),
    )
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    places = stream.position_ids[0].index_select(0, stream.logit_rows)
    for head, states in enumerate(outputs.chunk(1 + count)[1:]):
        seen = places > head
        rows = (stream.logit_rows - head - 1).clamp(min=0)
        log_probs, _ = vocab_parallel_log_probs(
            _whole(states, model).index_select(0, rows),
            matrix.weight.detach(),
            stream.targets,
            group=matrix.group,
            vocab_size=matrix.vocab_size,
        )
        total = total - (log_probs * mb.loss_mask * seen).sum() / count
    return total


def _whole(states: Tensor, model: GPTModel) -> Tensor:
    """Return [T, H] on every tensor-parallel rank; gradients are summed in the backward pass."""
    group = model.pg_collection.tp
    if model.config.sequence_parallel:
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True, group=group)
    else:
        states = copy_to_tensor_model_parallel_region(states, group=group)
    return states[:, 0]
