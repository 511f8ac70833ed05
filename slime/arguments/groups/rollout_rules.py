"""Rules about the fully asynchronous rollout: what contradicts a pool of groups that never stands still."""

from slime.arguments.core.draft import Draft
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION

REFUSED = {
    "colocate": "engines that give up the device for training cannot go on generating",
    "deterministic_mode": "which weights make a token depends on timing there",
    "partial_rollout": "nothing is cut off there, so nothing is to be continued",
}


def fully_async_rollout(draft: Draft) -> None:
    if draft.rollout_function_path != FULLY_ASYNC_ROLLOUT_FUNCTION:
        return
    for name, reason in REFUSED.items():
        if getattr(draft, name):
            raise ValueError(
                f"--{name.replace('_', '-')} with the fully asynchronous rollout function: {reason}; remove "
                "one of them."
            )
    if draft.rollout_max_response_len is None:
        raise ValueError("--rollout-max-response-len is required: give the longest response in tokens.")
