"""The learning rate of each optimizer step, from the flags: a warm-up, then constant, linear or cosine."""

import math

from slime.arguments import Args


def learning_rate(args: Args, step: int, decay_steps: int | None) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up to --lr, then decay to --min-lr."""
    warmup = args.lr_warmup_iters or round((args.lr_warmup_fraction or 0.0) * (decay_steps or 0))
    if step < warmup:
        return args.lr * (step + 1) / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    if not decay_steps:
        raise ValueError(
            f"--lr-decay-style is {args.lr_decay_style} but the number of steps to decay over is unknown: "
            "set --lr-decay-iters."
        )
    progress = min((step - warmup) / max(decay_steps - warmup, 1), 1.0)
    share = 1.0 - progress if args.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return args.min_lr + (args.lr - args.min_lr) * share
