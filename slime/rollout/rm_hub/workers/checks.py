"""Run a comparison in the check pool, under a deadline; an answer that is too large counts as wrong."""

from __future__ import annotations

import logging
from typing import Any

from slime.arguments import PluginArgs
from slime.observability.rollout_metrics import NOT_COMPARED_KEY
from slime.rollout.rm_hub.workers.check_pool import get_pool
from slime.rollout.rm_hub.workers.limits import MAX_RESPONSE_CHARS
from slime.utils.reward_failure import AnswerTooLarge, RewardFailure
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_num_not_compared = 0  # over the life of the process; only for how often it is logged


async def check(
    args: PluginArgs, sample: Sample, function: str, response: str, *truth: Any, wrong: Any = 0
) -> Any:
    """What the function at this path returns in a worker for the response and the truth to compare it with.

    An answer that is too large to be compared scores `wrong`: whoever writes a tower of powers is not
    right, and must not be able to end a run.
    """
    global _num_not_compared
    if len(response) > MAX_RESPONSE_CHARS:
        reason = f"a response of {len(response)} characters, more than {MAX_RESPONSE_CHARS}"
    else:
        module, _, name = function.rpartition(".")
        outcome = await get_pool(args).check(f"{module}:{name}", response, *truth)
        if not isinstance(outcome, AnswerTooLarge):
            return outcome
        reason = outcome.reason
    sample.metadata[NOT_COMPARED_KEY] = reason
    _num_not_compared += 1
    if _num_not_compared & (_num_not_compared - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
        what = f"sample {sample.index}: its answer is too large to be compared and counts as wrong ({reason})"
        logger.warning("%s; %d so far", what, _num_not_compared)
    return wrong


async def box_of(args: PluginArgs, sample: Sample, response: str) -> str | RewardFailure:
    """The content of the last box of a response, empty when there is none."""
    function = "slime.rollout.rm_hub.math_utils.extract_boxed_answer"
    return await check(args, sample, function, response, wrong="") or ""
