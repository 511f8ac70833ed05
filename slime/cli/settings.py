"""Flags of a run at their defaults, for commands that build a trainer without one."""

from typing import Any

from slime.arguments import Args
from slime.arguments.all_flags import all_specs


def default_settings(**changes: Any) -> Args:
    """Every flag at its default, except those named."""
    values = {name: spec.default for name, spec in all_specs().items()}
    # What the parser derives where these are left open.
    values |= {"policy_loss_type": "ppo", "loss_reduction": "rollout_mean", "sglang_options": []}
    unknown = sorted(set(changes) - set(values))
    assert not unknown, f"no such flag: {', '.join(unknown)}"
    return Args(values | changes, sources=dict.fromkeys(values, "default") | dict.fromkeys(changes, "code"))
