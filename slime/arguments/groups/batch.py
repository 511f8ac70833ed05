"""The batch algebra: how prompts, samples and optimizer steps fit together, in numbers and in words."""

from typing import Any

from slime.arguments.core.draft import Draft


def explain_batch(args: Any) -> str:
    """One line such as `32 prompts x 8 samples = 256 = 2 optimizer steps of 128`."""
    total = args.rollout_batch_size * args.n_samples_per_prompt
    steps = total // args.global_batch_size
    return f"{_product(args)} = {total} = {_count(steps, 'optimizer step')} of {args.global_batch_size}"


def derive_batch(draft: Draft) -> None:
    """Either of --global-batch-size and --num-steps-per-rollout gives the
    other; neither means one step per rollout.
    """
    total = draft.rollout_batch_size * draft.n_samples_per_prompt
    if draft.num_steps_per_rollout is None and draft.global_batch_size is None:
        draft.derive("global_batch_size", total, "all samples of a rollout make one optimizer step")
        draft.derive("num_steps_per_rollout", 1, "samples of a rollout / global_batch_size")
    elif draft.num_steps_per_rollout is None:
        _check_global_batch(draft, total)
        steps = total // draft.global_batch_size
        draft.derive("num_steps_per_rollout", steps, "samples of a rollout / global_batch_size")
    else:
        _check_steps(draft, total)
        draft.derive(
            "global_batch_size",
            total // draft.num_steps_per_rollout,
            "samples of a rollout / num_steps_per_rollout",
        )


def _check_global_batch(draft: Draft, total: int) -> None:
    size = draft.global_batch_size
    if size > total:
        raise ValueError(
            f"--global-batch-size is {size}, but one rollout makes only {_product(draft)} = {total}: no "
            f"optimizer step would ever be full. Use at most {total}, or raise --rollout-batch-size."
        )
    if total % size:
        steps, rest = divmod(total, size)
        raise ValueError(
            f"--global-batch-size is {size}, but {_product(draft)} = {total} = "
            f"{_count(steps, 'optimizer step')} of "
            f"{size} and {rest} left over, which would not be trained on. Use a divisor of {total} "
            f"(nearest: {_nearest_divisor(total, size)}), or --num-steps-per-rollout."
        )


def _check_steps(draft: Draft, total: int) -> None:
    steps, size = draft.num_steps_per_rollout, draft.global_batch_size
    if total % steps:
        raise ValueError(
            f"--num-steps-per-rollout is {steps}, but {_product(draft)} = {total} cannot be cut into "
            f"{steps} equal "
            f"optimizer steps. Use a divisor of {total} (nearest: {_nearest_divisor(total, steps)})."
        )
    if size is not None and size * steps != total:
        raise ValueError(
            f"--global-batch-size is {size} and --num-steps-per-rollout is {steps}: together {size * steps} "
            f"samples, but {_product(draft)} = {total}. Give only one of them, or make them agree ({steps} "
            f"steps of {total // steps})."
        )


def _product(args: Any) -> str:
    return f"{_count(args.rollout_batch_size, 'prompt')} x {_count(args.n_samples_per_prompt, 'sample')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))
