"""Finds the decoder layers of a transformers model, and the routers that choose experts in them."""

from typing import Any

from torch import nn


def decoder_layers(lm: Any) -> list[nn.Module]:
    """Return the layers: the smallest parts of a model that transformers keeps together."""
    names = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


def routers(part: nn.Module) -> list[Any]:
    """Return the modules that choose experts; their last output is the chosen indices [T, top k]."""
    names = ("top_k", "num_experts", "weight")
    return [module for module in part.modules() if all(hasattr(module, name) for name in names)]
