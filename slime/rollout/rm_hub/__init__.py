"""Rewards: the hub of built-in ones, custom and remote ones, and the one
entry the rollout calls, `score_samples`.

The public names load on first use. The light modules of this package (`math_utils`, `math_check`, ...) run
inside check workers, which must start in milliseconds and therefore must not import torch by way of this
file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.rollout.answers import answer_text
    from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
    from slime.rollout.rm_hub.hub import async_rm, batched_async_rm
    from slime.rollout.rm_hub.math_utils import grade_answer_verl
    from slime.rollout.rm_hub.outcomes import RewardConfigError, RewardFailuresExceeded, settle_reward
    from slime.rollout.rm_hub.remote import remote_rm
    from slime.rollout.rm_hub.scoring import score_samples

_HOMES = {
    "answer_text": ".answers",
    "async_rm": "hub",
    "batched_async_rm": "hub",
    "get_deepscaler_rule_based_reward": "deepscaler",
    "grade_answer_verl": "math_utils",
    "remote_rm": "remote",
    "score_samples": "scoring",
    "settle_reward": "outcomes",
    "RewardConfigError": "outcomes",
    "RewardFailuresExceeded": "outcomes",
}

__all__ = [
    "RewardConfigError",
    "RewardFailuresExceeded",
    "answer_text",
    "async_rm",
    "batched_async_rm",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
    "score_samples",
    "settle_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # so that patching the name here works as with any module global
    return value
