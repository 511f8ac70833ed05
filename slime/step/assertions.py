"""Assertions of a tested run (--ci-test): zero KL before the first update, expected gradient norms.

The difference between engine and trainer (--ci-train-rollout-logprob-abs-diff-threshold) is checked where
every run checks it (`agreement.py`).
"""

import math
from pathlib import Path

import torch

from slime.arguments import Flags
from slime.backends.shared.trainer_base import TrainBackend
from slime.step.token_terms import ON_POLICY_LIMITS
from slime.utils.errors import RunStopped

GRAD_NORM_TOLERANCE = 0.01  # relative and absolute


def check_step(
    args: Flags, backend: TrainBackend, rollout_id: int, step_id: int, metrics: dict[str, float]
) -> None:
    """Check an optimizer step of the policy, on every rank; `metrics` are the same on all ranks."""
    if args.ci_test and not args.ci_disable_kl_checker and rollout_id == step_id == 0 and args.load is None:
        _check_kl(args, backend, metrics)
    place = {"role": "actor", "rollout_id": rollout_id, "step_id": step_id}
    norm = metrics.get("train/grad_norm")
    if norm is None:  # the step was not applied
        return
    if args.ci_save_grad_norm and backend.layout.is_first_of_stage and backend.layout.pp_rank == 0:
        file = Path(args.ci_save_grad_norm.format(**place)).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(norm, file)
    if args.ci_load_grad_norm:
        _compare_norm(Path(args.ci_load_grad_norm.format(**place)).expanduser(), norm)


def _check_kl(args: Flags, backend: TrainBackend, metrics: dict[str, float]) -> None:
    """Check that before the first update the policy equals its reference and its old policy."""
    same = args.ref_load in (None, args.start_from)
    names = ["train/ppo_kl"] + ["train/kl_loss"] * same
    limit = ON_POLICY_LIMITS.get(backend.compute_dtype, 1e-3)
    apart = {name: metrics[name] for name in names if abs(metrics.get(name, 0.0)) > limit}
    if apart:
        shown = ", ".join(f"{name} {value:.3g}" for name, value in apart.items())
        raise RunStopped(
            f"--ci-test: {shown} in the first step, where the policy is still unchanged (limit {limit:g}); "
            "--ci-disable-kl-checker leaves this out."
        )


def _compare_norm(file: Path, norm: float) -> None:
    if not file.is_file():
        raise RunStopped(f"--ci-load-grad-norm: there is no {file}; write it with --ci-save-grad-norm.")
    expected = float(torch.load(file, weights_only=True))
    if not math.isclose(norm, expected, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        raise RunStopped(
            f"--ci-load-grad-norm: the gradient norm is {norm:.6g}, but {file} says {expected:.6g}."
        )
