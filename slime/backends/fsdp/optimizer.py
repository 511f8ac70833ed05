"""The optimizer of the FSDP trainer, from the flags: AdamW or SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slime.arguments import Args
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW


def build_optimizer(args: Args, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two parameter groups: matrices with weight decay; vectors (norms, biases) without."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim > 1) is matrix] for matrix in (True, False))
    decays = ((matrices, args.weight_decay), (vectors, 0.0))
    groups: list[dict[str, Any]] = [{"params": own, "weight_decay": decay} for own, decay in decays if own]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr)
    betas = (args.adam_beta1, args.adam_beta2)
    settings: dict[str, Any] = {"lr": args.lr, "betas": betas, "eps": args.adam_eps}
    plan = MomentPlan.of(args)
    if not plan.is_plain:
        return PlacedAdamW(groups, plan, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)
