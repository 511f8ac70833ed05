"""Rewards: the hub of built-in ones, custom and remote ones, and the one
entry the rollout calls, `score_samples`.

The public names load on first use. The light modules of this package (`math_utils`, `math_check`, ...) run
inside check workers, which must start in milliseconds and therefore must not import torch by way of this
file.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "answer_text": ".response_text",  # the former name of `response_text`
    "response_text": ".response_text",
    "async_rm": "hub",
    "batched_async_rm": "hub",
    "get_deepscaler_rule_based_reward": "deepscaler",
    "grade_answer_verl": "math_utils",
    "remote_rm": "remote",
    "score_samples": "scoring",
    "RewardConfigError": "outcomes",
    "RewardFailuresExceeded": "outcomes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # so that patching the name here works as with any module global
    return value
