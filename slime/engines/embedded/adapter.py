"""Merges low-rank adapters into the weights of a served model.

The weights without adapters are kept in host memory, so that the next adapters start from the same values:
nothing is subtracted, and rounding errors do not add up. Names are peft's. Only linear layers are covered,
and none of the LoRA variants of peft's config.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slime.engines.embedded.weight_update import (
    BadWeights,
    Source,
    refuse_non_finite,
    same_bytes,
    tensor_bytes,
)
from slime.wire.manifest import byte_checksum
from slime.wire.protocol import shown

_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
# Settings that would change the meaning of the factors -> peft's neutral values.
_NEUTRAL: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def scale_of(config: Any) -> float:
    """Return the factor of the factors' product, from peft's config."""
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise BadWeights("config_dict must be the adapter_config.json of a LORA adapter")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in (neutral, None):
            raise BadWeights(
                f"the adapter's {name} is {shown(config[name])}: the embedded engine takes {neutral!r} only"
            )
    try:
        scale = float(config["lora_alpha"]) / int(config["r"])
        if not math.isfinite(scale):
            raise ValueError(f"lora_alpha / r is {scale}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadWeights(f"config_dict needs numbers r and lora_alpha: {shown(str(error))}") from error
    return scale


class AdaptedWeights:
    """Merges adapters into one model's weights, and keeps the weights without them."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._base: dict[str, torch.Tensor] = {}  # weight name -> its values without adapters, on the CPU
        self._factors: dict[str, torch.Tensor] = {}  # unchanged
        self.name: str | None = None  # name in requests; None: there are none

    def forget(self) -> None:
        """Drop the adapters: the model got other weights, to which adapters are now added."""
        self._base, self._factors, self.name = {}, {}, None

    def check(self, source: Source) -> None:
        """Raise BadWeights unless the tensors are whole pairs of factors that fit their layers."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        pairs: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in source.shapes.items():
            weight, factor = _split(name)
            if weight not in parameters or len(shape) != 2:
                raise BadWeights(
                    f"adapter tensor {name} of shape {list(shape)} matches no layer of this model"
                )
            pairs.setdefault(weight, {})[factor] = shape
        for weight, shapes in pairs.items():
            if len(shapes) != 2:
                raise BadWeights(f"{weight} has only one adapter factor")
            (rank_a, columns), (rows, rank_b) = (shapes[factor] for factor in _FACTORS)
            if rank_a != rank_b or (rows, columns) != tuple(parameters[weight].shape):
                raise BadWeights(
                    f"the adapter of {weight} has factors {[rows, rank_b]} and {[rank_a, columns]}, the "
                    f"weight is {list(parameters[weight].shape)}"
                )

    @torch.no_grad()
    def check_finite(self, source: Source) -> None:
        """Raise BadWeights at the first factor with a value that is not finite."""
        for name, tensor in source.tensors():
            refuse_non_finite(name, tensor, torch.float32)

    @torch.no_grad()
    def apply(self, source: Source, scale: float, name: str) -> tuple[int, int]:
        """Replace the adapters; returns (tensors, bytes). Call `check` first: this must not fail half-way."""
        factors = {key: tensor.clone() for key, tensor in source.tensors()}
        weights = {_split(key)[0] for key in factors}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for weight in weights - self._base.keys():
            self._base[weight] = parameters[weight].detach().to("cpu", copy=True)
        for weight, base in self._base.items():
            parameter = parameters[weight]
            value = base.to(parameter.device)
            if weight in weights:
                layer = _PREFIX + weight.removesuffix(".weight")
                a, b = (factors[layer + factor].to(parameter.device).float() for factor in _FACTORS)
                value = value.float() + scale * (b @ a)
                refuse_non_finite(f"{weight} with its adapter", value, parameter.dtype)
            parameter.copy_(value)
        self._factors, self.name = factors, name
        return len(factors), sum(tensor.nbytes for tensor in factors.values())

    def differing(self, source: Source) -> list[str]:
        """Return names of factors whose bytes differ from the source's, or that only one side has."""
        given, own = dict(source.tensors()), self._factors
        changed = {name for name in given.keys() & own.keys() if not same_bytes(own[name], given[name])}
        return sorted(changed | (given.keys() ^ own.keys()))

    def checksums(self, of_weights: Mapping[str, int]) -> dict[str, int]:
        """Return checksums of plain weights and factors, equal on any machine, unlike those of products."""
        own = {**self._base, **self._factors}
        return {**of_weights, **{name: byte_checksum(tensor_bytes(t)) for name, t in own.items()}}


def _split(name: str) -> tuple[str, str]:
    """Split `base_model.model.layers.0.q_proj.lora_A.weight` into the layer's weight and the factor."""
    for factor in _FACTORS:
        if name.startswith(_PREFIX) and name.endswith(factor):
            return name.removeprefix(_PREFIX).removesuffix(factor) + ".weight", factor
    raise BadWeights(f"tensor {name} is not a factor of a low-rank adapter")
