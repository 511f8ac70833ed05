"""The loss types (`--loss-type`), and the curves that show whether a run learns: the main one comes first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric under the title that people read. `falls`: lower is better."""

    title: str
    metric: str
    falls: bool = False


@dataclass(frozen=True, slots=True)
class LossType:
    """One loss type. `curves`: what it minimises, as far as the numbers have a meaning of their own."""

    curves: tuple[Curve, ...] = ()
    is_supervised: bool = False  # has no advantages: its data is given, not scored
    has_pairs: bool = False  # trains on pairs of a preferred and a rejected response


REWARD = Curve("reward", "rollout/raw_reward")
LOSS = Curve("loss", "train/loss", falls=True)
TEACHER_KL = Curve("teacher KL", "rollout/opd_reverse_kl", falls=True)
_OF_PAIRS = (LOSS, Curve("accuracy", "train/accuracy"), Curve("margin", "train/margin"))
# Rollout and reward functions of slime whose samples have no reward that means anything.
_UNSCORED = tuple(
    f"slime.rollout.{name}." for name in ("sft_rollout", "preference_rollout", "on_policy_distillation")
)

LOSS_TYPES: dict[str, LossType] = {
    "policy_loss": LossType(),
    "sft_loss": LossType((LOSS,), is_supervised=True),
    "dpo_loss": LossType(_OF_PAIRS, is_supervised=True, has_pairs=True),
    "rm_loss": LossType(_OF_PAIRS, is_supervised=True, has_pairs=True),
    "custom_loss": LossType(),
}


def has_rewards(settings: Mapping[str, Any]) -> bool:
    """Return whether the rewards of a run mean anything: given data and a teacher have none."""
    functions = (settings.get(name) for name in ("rollout_function_path", "custom_rm_path"))
    return not any(str(path).startswith(_UNSCORED) for path in functions)


def describe_reward(settings: Mapping[str, Any], reward: float | None) -> str:
    """Return how a sample was judged, in words; empty where a run with these settings has no rewards."""
    if has_rewards(settings):
        return "no reward" if reward is None else f"reward {reward:g}"
    has_pairs = LOSS_TYPES.get(settings.get("loss_type") or "", LossType()).has_pairs
    return ("preferred" if reward else "rejected") if has_pairs else ""


def curves_of(settings: Mapping[str, Any]) -> tuple[Curve, ...]:
    """Return the curves that show whether a run with these settings learns; the first is its main curve."""
    loss_type = LOSS_TYPES.get(settings.get("loss_type") or "", LossType())
    curves = [*loss_type.curves]
    curves += [REWARD] if has_rewards(settings) else []
    curves += [TEACHER_KL] if settings.get("use_opd") else []
    return tuple(curves or [LOSS])


def method_of(settings: Mapping[str, Any]) -> str | None:
    """Return the name of what trains the model: an estimator, a loss type, or distillation; None: unknown."""
    loss_type: str | None = settings.get("loss_type")
    if loss_type not in (None, "policy_loss"):
        return loss_type
    estimator: str | None = settings.get("advantage_estimator")
    return estimator if has_rewards(settings) else "distillation"
