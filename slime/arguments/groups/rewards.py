"""Flags and rules of rewards: which function scores a sample, and what happens when it fails to."""

import math
from dataclasses import dataclass
from difflib import get_close_matches

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import both, flag, having, lacks, needs
from slime.arguments.groups.algorithm import COMPUTES_ADVANTAGES
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.rewards import BOXED, REWARDS, find_reward

_RM_TYPES = "; ".join(f"{name}: {reward.help}" for name, reward in REWARDS.items())
# The entry of a dict reward that holds the sum of --reward-weights.
WEIGHTED_REWARD_KEY = "weighted_sum"


def _may_be_remote(draft: Draft) -> bool:
    reward = find_reward(draft.rm_type)
    return draft.custom_rm_path is not None or reward is None or reward.needs_rm_url


# -- when flags have an effect
SHAPED = both(lacks("loss_type", *SUPERVISED_LOSSES), lacks("custom_reward_post_process_path"))
REMOTE = needs("rm_type", *having(REWARDS, "needs_rm_url"), or_if=_may_be_remote)


@dataclass
class RewardFlags:
    """Rewards."""

    rm_type: str | None = flag(
        None,
        f"built-in reward. {_RM_TYPES}. {BOXED}<name> scores only the last \\boxed{{...}}",
        metavar="NAME",
    )
    custom_rm_path: str | None = flag(None, "your own reward function")
    group_rm: bool = flag(False, "the reward function scores a whole group at a time")
    rm_url: str | None = flag(None, "server of the remote_rm reward", metavar="URL", only_with=REMOTE)
    reward_key: str | None = flag(None, "entry of a dict reward to use")
    eval_reward_key: str | None = flag(None, "dict entry used in evaluation; default: --reward-key")
    reward_weights: dict | None = flag(
        None, "weights of the entries of a dict reward, as JSON", only_with=SHAPED
    )
    overlong_buffer_len: int | None = flag(
        None,
        "last tokens of the longest response over which a penalty grows",
        ge=1,
        only_with=(SHAPED, COMPUTES_ADVANTAGES),
    )
    custom_reward_post_process_path: str | None = flag(None, "function in place of group normalisation")
    reward_failure_action: str = flag(
        "requeue", "what to do with a sample whose reward keeps failing", choices=("requeue", "drop", "stop")
    )


def rewards(draft: Draft) -> None:
    if draft.rm_type is not None:
        name = draft.rm_type.removeprefix(BOXED)
        if name not in REWARDS:
            near = get_close_matches(name, REWARDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(REWARDS)}"
            raise ValueError(f"--rm-type is {draft.rm_type!r}, which is no built-in reward; {hint}")
        if REWARDS[name].needs_rm_url and draft.rm_url is None:
            raise ValueError(f"--rm-type {name} needs --rm-url: the server that scores samples.")
    if draft.rm_url is not None and "://" not in draft.rm_url:
        raise ValueError(f"--rm-url is {draft.rm_url!r}: write an address such as http://host:port/score.")
    if draft.eval_reward_key is None and draft.reward_key is not None:
        draft.derive("eval_reward_key", draft.reward_key, "same as reward_key")


def reward_shaping(draft: Draft) -> None:
    if draft.reward_weights is not None:
        _check_weights(draft)
        draft.derive("reward_key", WEIGHTED_REWARD_KEY, "the sum of reward_weights")
    _check_components(draft)
    size, longest = draft.overlong_buffer_len, draft.rollout_max_response_len
    if size is not None and (longest is None or size > longest):
        raise ValueError(
            f"--overlong-buffer-len is {size}, but --rollout-max-response-len is {longest}: use less."
        )
    if size is not None and ESTIMATORS[draft.advantage_estimator].divides_by_mean_reward:
        raise ValueError(
            "--overlong-buffer-len makes rewards of long responses negative, and --advantage-estimator "
            f"{draft.advantage_estimator} divides by the mean reward, which must be at least 0; remove it."
        )


def _check_components(draft: Draft) -> None:
    estimator = draft.advantage_estimator
    if draft.loss_type in SUPERVISED_LOSSES or not ESTIMATORS[estimator].by_component:
        return
    if draft.reward_weights is None and draft.custom_reward_post_process_path is None:
        raise ValueError(
            f"--advantage-estimator {estimator} compares each component of a dict reward by itself: name the "
            """components with --reward-weights '{"correct": 1, "format": 0.2}', or use grpo."""
        )
    for name in ("overlong_buffer_len", "turn_discount"):
        if getattr(draft, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} changes the sum of the components, and --advantage-estimator "
                f"{estimator} compares each by itself; remove it, or use grpo."
            )


def _check_weights(draft: Draft) -> None:
    if draft.reward_key is not None:
        raise ValueError("--reward-key and --reward-weights: one entry or a sum of entries counts; keep one.")
    weights = draft.reward_weights
    if not weights or not all(type(w) in (int, float) and math.isfinite(w) for w in weights.values()):
        raise ValueError(f"--reward-weights is {weights}: expected a number for each entry of the reward.")
