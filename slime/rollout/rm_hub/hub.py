"""Chooses and calls the reward of a sample: custom functions first, then built-in types by name."""

from __future__ import annotations

import asyncio
import copy
import difflib
import importlib.util
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slime.arguments import Flags, PluginArgs, with_defaults
from slime.catalog.deadlines import timeout_s
from slime.catalog.rewards import BOXED, REWARDS, Reward
from slime.liveness import waits
from slime.observability.rollout_metrics import NOT_COMPARED_KEY
from slime.rollout.prompt_groups import describe_fully
from slime.rollout.response_text import response_text
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.rollout.rm_hub.workers.check_pool import get_pool
from slime.rollout.rm_hub.workers.limits import MAX_RESPONSE_CHARS
from slime.utils.async_utils import in_background
from slime.utils.column_rewards import needs_whole_group, reward_columns, scores_of, takes_columns
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.reward_failure import ComparisonTooLarge, RewardFailure, infra_error, invalid
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

CUSTOM_RM = "--custom-rm-path"
_FIND_BOX = "slime.rollout.rm_hub.math_utils.extract_boxed_answer"
_MAX_REWARD_THREADS = 64


async def async_rm(args: PluginArgs, sample: Sample, **kwargs: Any) -> Any:
    """Return what the sample's reward function returns: a number, a dict or a RewardFailure."""
    path = custom_path_of(with_defaults(args), sample)
    if path is not None:
        return await call_custom(args, path, sample, **kwargs)
    rm_type = rm_type_of(args, sample)
    name = rm_type.removeprefix(BOXED)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = f"known types are {', '.join(sorted(REWARDS))}, each also with the prefix {BOXED!r}"
        raise RewardConfigError(f"unknown --rm-type {name!r}: {hint}{known}")
    reward = REWARDS[name]
    sample.metadata.pop(NOT_COMPARED_KEY, None)  # of an earlier answer
    response = response_text(args, sample)
    if rm_type != name and not reward.reads_box:
        boxed = await check(args, sample, _FIND_BOX, response, wrong="") or ""
        if isinstance(boxed, RewardFailure):
            return boxed
        needs_line = reward.reads_answer_line and "answer" not in boxed.lower()
        response = f"Answer: {boxed}" if needs_line else boxed
    if not reward.in_worker:
        return await load_function(reward.function)(args, sample, response=response)
    return await _compare(args, sample, name, reward, response)


async def _compare(args: PluginArgs, sample: Sample, name: str, reward: Reward, response: str) -> Any:
    """Score a response by a comparison in a worker process."""
    if reward.package is not None and importlib.util.find_spec(reward.package.replace("-", "_")) is None:
        hint = f"pip install 'slime-rl[{reward.extra}]'"
        raise RewardConfigError(f"--rm-type {name} needs the {reward.package} package: {hint}")
    missing = sample.label is None or (sample.label == "" and not reward.empty_label)
    if reward.needs_label and missing and reward.label_entry not in sample.metadata:
        return invalid(f"--rm-type {name} needs a label and sample {sample.index} has none: set --label-key")
    truth = [str(sample.label) if reward.label == "one" else sample.label]
    if reward.metadata:
        # The other entries may be large, or of a kind that the worker does not know.
        truth.append({entry: sample.metadata[entry] for entry in reward.metadata if entry in sample.metadata})
    return await check(args, sample, reward.function, response, *truth, wrong=copy.copy(reward.wrong))


async def check(
    args: PluginArgs, sample: Sample, function: str, response: str, *truth: Any, wrong: Any = 0
) -> Any:
    """Return what the function at this path makes of a response in a worker process.

    A response that is too large to be compared scores `wrong`: a tower of powers is not right, and must not
    be able to end a run.
    """
    if len(response) > MAX_RESPONSE_CHARS:
        reason = f"a response of {len(response)} characters, more than {MAX_RESPONSE_CHARS}"
    else:
        module, _, name = function.rpartition(".")
        outcome = await get_pool(args).check(f"{module}:{name}", response, *truth)
        if not isinstance(outcome, ComparisonTooLarge):
            return outcome
        reason = outcome.reason
    sample.metadata[NOT_COMPARED_KEY] = reason
    what = "its answer is too large to be compared and counts as wrong"
    logger.warning("Sample %s: %s (%s)", sample.index, what, reason)
    return wrong


async def batched_async_rm(args: PluginArgs, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Return one value per sample. With --group-rm the custom function sees the whole group."""
    path = with_defaults(args).custom_rm_path
    if path is not None and scores_groups(args, samples):
        values = await call_custom(args, path, list(samples), **kwargs)
        return _one_per_sample(path, values, samples)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


def scores_groups(args: PluginArgs, samples: Sequence[Sample]) -> bool:
    """Return whether one call scores the group (--group-rm); a sample's own function takes one sample."""
    own = any(sample.custom_rm_path for sample in samples)
    return bool(args.custom_rm_path) and waits_for_group(args) and not own


def waits_for_group(args: Flags) -> bool:
    return needs_whole_group(args.group_rm, args.custom_rm_path)


def custom_path_of(args: PluginArgs, sample: Sample) -> str | None:
    """Return the custom reward of this sample: its own, else the run's; it wins over `rm_type`."""
    return sample.custom_rm_path or args.custom_rm_path


def rm_type_of(args: PluginArgs, sample: Sample) -> str:
    """Return the name of the built-in reward: the metadata's `rm_type`, else --rm-type."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or args.rm_type or "").strip()
    if not rm_type:
        hint = "set --rm-type, --custom-rm-path or rm_type in its metadata"
        raise RewardConfigError(f"sample {sample.index} has no reward: {hint}")
    return rm_type


async def call_custom(args: PluginArgs, path: str, subject: Any, **kwargs: Any) -> Any:
    """Call a user's reward function, async or plain, with a deadline; a mistake in it ends the run."""
    function = load_function(path)
    telling_mistakes = plugin_call(
        CUSTOM_RM, path, lambda: describe_fully(subject), keep=(RewardConfigError,)
    )
    limit_s = timeout_s(args, "generate")
    waited = waits.waiting(f"reward {path}", owner="rollout", deadline_s=limit_s)
    try:
        async with asyncio.timeout(limit_s) as deadline:
            with waited, telling_mistakes:
                if takes_columns(function):
                    return await _call_with_columns(args, path, function, subject)
                if inspect.iscoroutinefunction(function):
                    return await function(args, subject, **kwargs)
                value = await _in_thread(lambda: function(args, subject, **kwargs))
                return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if not deadline.expired():
            raise  # a time-out of the function's own
        return infra_error(f"{path} did not return within --timeouts generate={limit_s:g}")


async def _call_with_columns(
    args: PluginArgs, path: str, function: Callable[..., Any], subject: Sample | list[Sample]
) -> Any:
    """Call a reward with TRL's signature: lists in, a list of scores for a group, one for a sample."""
    samples = subject if isinstance(subject, list) else [subject]
    columns = reward_columns(function, samples, [response_text(args, sample) for sample in samples])
    value = await _in_thread(lambda: function(**columns))
    scores = scores_of(await value if inspect.isawaitable(value) else value)
    return scores if isinstance(subject, list) else _one_per_sample(path, scores, samples)[0]


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a plain function in a daemon thread: one that hangs must not delay our exit."""

    def in_turn() -> Any:
        with _thread_slots:
            return call()

    return await asyncio.wrap_future(in_background(in_turn, "reward-function"))


_thread_slots = threading.BoundedSemaphore(_MAX_REWARD_THREADS)


def _one_per_sample(path: str, values: Any, samples: Sequence[Sample]) -> list[Any]:
    if isinstance(values, RewardFailure):
        return [values] * len(samples)
    if isinstance(values, (str, dict)) or not isinstance(values, Iterable):
        complaint = f"returned {type(values).__name__} for a group: return a list with one reward per sample"
    elif len(listed := list(values)) == len(samples):
        return listed
    else:
        complaint = f"returned {len(listed)} rewards for {len(samples)} samples"
    wrong_return(CUSTOM_RM, path, complaint, describe_fully(samples))
