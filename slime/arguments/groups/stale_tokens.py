"""Runs that train on tokens of older weights by design: a correction
is chosen for them unless the user chose.
"""

from slime.arguments.args import Args
from slime.arguments.core.draft import ASYNCHRONOUS, Draft
from slime.arguments.groups.off_policy import CORRECTIONS
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION


def correct_stale_tokens(draft: Draft) -> None:
    """Truncated importance weights are the default: they need nothing that
    is not there, and are 1 on fresh tokens.
    """
    reasons = {
        "the asynchronous loop": draft.training_loop == ASYNCHRONOUS,
        "the fully asynchronous rollout": draft.rollout_function_path == FULLY_ASYNC_ROLLOUT_FUNCTION,
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is None or draft.loss_type != "policy_loss" or draft.was_given("use_tis"):
        return
    if any(getattr(draft, name) for name in (*CORRECTIONS, "custom_tis_function_path")):
        return
    draft.derive(
        "use_tis", True, f"{reason} trains on tokens of older weights (--no-use-tis: as if they were fresh)"
    )


def for_asynchronous_loop(args: Args) -> Args:
    """The settings as they would be had they been parsed for the asynchronous loop:
    scripts may parse before they choose it.
    """
    draft = Draft.of(args, training_loop=ASYNCHRONOUS)
    correct_stale_tokens(draft)
    return draft.freeze()
