"""Trains weights that engines hold in INT4: the forward pass rounds them, gradients pass straight through.

The optimizer changes the unrounded weights. Which weights these are must agree with what is pushed
(`slime/weight_sync/int4.py`): the experts of a mixture, else all linear layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.algorithms.model_parts import decoder_layers
from slime.backends.experts.experts_operator import gated_experts
from slime.backends.fsdp.grouped_experts import replace_experts
from slime.backends.fsdp.layer_execution import HFModel
from slime.utils.models.int4_groups import GROUP, fake_quantized

_FLAG = "--rollout-quantization int4"


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return fake_quantized(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Int4Linear(nn.Linear):
    """A linear layer whose weight is rounded to INT4 in the forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, _Rounded.apply(self.weight), self.bias)


def use_int4(lm: HFModel, device: torch.device, dtype: torch.dtype) -> None:
    """Round the weights that engines hold in INT4; a model of which they are not known is a ValueError."""
    kind, layers = lm.config.model_type, decoder_layers(lm)
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError(f"{_FLAG}: INT4 weights on a GPU stand for bfloat16; use --dtype bfloat16.")
    if lm.config.get_text_config() is not lm.config:
        raise ValueError(f"{_FLAG}: {kind} has parts besides its text model; remove it.")
    if replace_experts(lm, layers, _forward, _FLAG, GROUP):
        return
    for layer in layers:
        for name, module in layer.named_modules():
            if type(module) is nn.Linear:
                if (size := module.in_features) % GROUP:
                    raise ValueError(f"{_FLAG}: {name} of {kind} has rows of {size}, no multiple of {GROUP}.")
                module.__class__ = Int4Linear


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    gate_up, down = _Rounded.apply(experts.gate_up_proj), _Rounded.apply(experts.down_proj)
    return gated_experts(hidden, gate_up, down, chosen, weights)
