"""Flags of the optimizer and its learning-rate schedule."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class OptimizerFlags:
    """Optimizer."""

    optimizer: str = flag("adam", "optimizer (adam is AdamW)", choices=("adam", "sgd"))
    lr: float = flag(1e-6, "learning rate", ge=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", ge=0)
    lr_decay_style: str = flag("constant", "schedule after warm-up", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", ge=0)
    lr_decay_iters: int | None = flag(None, "optimizer steps until --min-lr; default: the whole run", ge=1)
    weight_decay: float = flag(0.01, "weight decay (decoupled)", ge=0)
    adam_beta1: float = flag(0.9, "first-moment decay", ge=0, lt=1)
    adam_beta2: float = flag(0.999, "second-moment decay", ge=0, lt=1)
    adam_eps: float = flag(1e-8, "added to the denominator of Adam", gt=0)
    clip_grad: float = flag(1.0, "largest gradient norm; 0 turns clipping off", ge=0)
