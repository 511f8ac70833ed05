"""Scores the samples of a rollout, with retries and a circuit breaker for the whole run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.catalog.limits import limit
from slime.catalog.rewards import find_reward
from slime.observability.tracer import trace_span
from slime.rollout.prompt_groups import describe_fully
from slime.rollout.rm_hub.hub import (
    CUSTOM_RM,
    async_rm,
    batched_async_rm,
    custom_path_of,
    rm_type_of,
    scores_groups,
)
from slime.rollout.rm_hub.outcomes import RewardConfigError, RewardFailuresExceeded, judge, store
from slime.utils.async_utils import all_or_none
from slime.utils.errors import RunStopped
from slime.utils.plugin_errors import may_pass, place_of, wrong_return
from slime.utils.reward_failure import RewardFailure, infra_error
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

_RETRY_DELAY_S = 0.1


async def score_samples(args: PluginArgs, samples: Sequence[Any], *, evaluation: bool = False) -> None:
    """Give each sample (fan-out lists included) a score in `reward` or a cause in `reward_failure`.

    Aborted samples, and samples that have a cause, are left out. Samples that have a reward keep it, except
    that a group reward sees its whole group. Raises PluginError at the first mistake in a user's function,
    RewardConfigError when a reward can never work as it is configured, and RewardFailuresExceeded when
    rewards keep failing.
    """
    ended = [
        sample
        for sample in flatten_samples(samples)
        if sample.status is not Sample.Status.ABORTED and sample.reward_failure is None
    ]
    pending = [sample for sample in ended if sample.reward is None]
    if pending and scores_groups(args, ended):
        await _score(args, ended, evaluation, by_group=True)
    elif len(pending) == 1:  # the usual case needs no task of its own
        await _score(args, pending, evaluation)
    else:
        await all_or_none([_score(args, [sample], evaluation) for sample in pending])


async def _score(
    args: PluginArgs, samples: list[Sample], evaluation: bool, *, by_group: bool = False
) -> None:
    """Score one sample or a whole group by one call, and again where that may help."""
    path = args.custom_rm_path if by_group else custom_path_of(args, samples[0])
    with trace_span(samples, "group_reward_model" if by_group else "reward_model"):
        outcomes = await _attempt(args, samples, path, evaluation, by_group)
        for retry in range(limit(args, "reward-retries")):
            failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
            temporary = any(failure.kind == "infra_error" for failure in failures)
            if not temporary or (path is None and _is_remote(args, samples[0])):
                break  # remote judges have retries of their own
            logger.warning(
                "The reward of sample %s failed, retrying: %s", samples[0].index, failures[0].reason
            )
            await asyncio.sleep(_RETRY_DELAY_S * 2**retry)
            outcomes = await _attempt(args, samples, path, evaluation, by_group)
    for sample, outcome in zip(samples, outcomes, strict=True):
        _conclude(args, sample, outcome)


async def _attempt(
    args: PluginArgs, samples: list[Sample], path: str | None, evaluation: bool, by_group: bool
) -> list[Any]:
    """Call the reward once and return a score or a failure per sample; temporary errors are failures."""
    numbers = [(sample.index, sample.group_index) for sample in samples]
    try:
        value = await (batched_async_rm(args, samples) if by_group else async_rm(args, samples[0]))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is this task that is to end
        value = infra_error("the reward function raised CancelledError: what it waited for was cancelled")
    except Exception as error:
        if isinstance(error, RunStopped) or not may_pass(error):
            raise
        place = f" at {place_of(error, path)}" if path is not None else ""
        value = infra_error(f"reward function raised {type(error).__name__}: {error}{place}")
    if path is not None:
        for sample, known in zip(samples, numbers, strict=True):
            _check_unchanged(path, sample, known)
    several = by_group and not isinstance(value, RewardFailure)
    values = value if several else [value] * len(samples)
    return [_judged(args, *pair, evaluation) for pair in zip(samples, values, strict=True)]


def _check_unchanged(path: str, sample: Sample, numbers: tuple[int | None, int | None]) -> None:
    """Restore the sample's numbers after a user's reward: the ledger finds the sample by them."""
    sample.index, sample.group_index = numbers
    if not isinstance(sample.response, str):
        complaint = f"left a sample whose response is {sample.response!r:.80}, and no text."
        wrong_return(CUSTOM_RM, path, complaint, describe_fully(sample))


def _judged(args: PluginArgs, sample: Sample, value: Any, evaluation: bool) -> Any:
    """Return a score or a failure; raise for any other value, since a retry would return it again."""
    outcome = judge(args, value, evaluation=evaluation)
    if not isinstance(outcome, RewardFailure) or isinstance(value, RewardFailure):
        return outcome
    path = custom_path_of(args, sample)
    if path is not None:
        complaint = (
            f"returned no score: {outcome.reason}. Return a finite number, a dict with one, or "
            "invalid(reason) or infra_error(reason) of slime.utils.types."
        )
        wrong_return(CUSTOM_RM, path, complaint, describe_fully(sample))
    if _is_remote(args, sample):
        return outcome  # a remote judge may respond correctly next time
    raise RewardConfigError(f"--rm-type {rm_type_of(args, sample)}: {outcome.reason}")


def _is_remote(args: PluginArgs, sample: Sample) -> bool:
    reward = find_reward(rm_type_of(args, sample))
    return reward is not None and reward.is_remote


_failed_in_a_row = 0  # samples over the whole process; a success resets the count


def _conclude(args: PluginArgs, sample: Sample, outcome: Any) -> None:
    """Store an outcome as `judge` gave it; too many failures in a row stop the run."""
    global _failed_in_a_row
    store(sample, outcome)
    if sample.reward_failure is None:
        _failed_in_a_row = 0
        return
    logger.warning("Sample %s has no reward (%s): %s", sample.index, outcome.kind, outcome.reason)
    flag, allowed = "--reward-failure-action stop", 1
    if args.reward_failure_action != "stop":
        allowed = limit(args, "reward-failures")
        flag = f"--limits reward-failures={allowed}"
    _failed_in_a_row += 1
    if _failed_in_a_row >= allowed:
        count, _failed_in_a_row = _failed_in_a_row, 0  # the next run in this process starts fresh
        raise RewardFailuresExceeded(
            f"{count} sample(s) in a row got no reward; the last is sample {sample.index} (group "
            f"{sample.group_index}), {outcome.kind}: {outcome.reason}. Fix the reward, or change {flag}."
        )


def reset_breaker() -> None:
    """Forget earlier failures at the start of a run."""
    global _failed_in_a_row
    _failed_in_a_row = 0
