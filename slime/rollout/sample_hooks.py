"""Sample hooks: user functions that see each sample after generation, before its reward."""

import copy
import inspect
from contextvars import ContextVar
from typing import Any

from slime.arguments import PluginArgs, with_defaults
from slime.rollout.generation.returned import keep_identity, wrong_identity
from slime.rollout.prompt_groups import describe_fully
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.types import Sample

_OPTION = "--rollout-sample-hook-path"

_rollout_id: ContextVar[int | None] = ContextVar("slime_rollout_id", default=None)


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set for the calling thread or task and for everything it starts."""
    _rollout_id.set(rollout_id)


def current_rollout_id() -> int | None:
    return _rollout_id.get()


async def apply_rollout_sample_hooks(
    args: PluginArgs, sample: Sample | list, *, evaluation: bool = False, rollout_id: int | None = None
) -> Sample | list:
    """Run every hook on every sample; a hook that returns None has changed the sample in place."""
    if not with_defaults(args).rollout_sample_hook_path:
        return sample
    if isinstance(sample, list):
        return [
            await apply_rollout_sample_hooks(args, one, evaluation=evaluation, rollout_id=rollout_id)
            for one in sample
        ]
    known = _rollout_id.get() if rollout_id is None else rollout_id
    context = {"rollout_id": known, "evaluation": evaluation}
    for path in args.rollout_sample_hook_path:
        sample = await _call_hook(path, args, sample, context)
    return sample


async def _call_hook(path: str, args: PluginArgs, sample: Sample, context: dict[str, Any]) -> Sample:
    hook, source = load_function(path), copy.copy(sample)  # the hook may change the sample in place
    with plugin_call(_OPTION, path, lambda: describe_fully(sample)):
        result = hook(args, sample, **_accepted(hook, context))
        if inspect.isawaitable(result):
            result = await result
    result = sample if result is None else result
    if not isinstance(result, Sample):
        complaint = f"returned {type(result).__name__}; return a Sample or None."
        wrong_return(_OPTION, path, complaint, describe_fully(sample))
    keep_identity(result, source)
    if wrong := wrong_identity(result, source):
        wrong_return(_OPTION, path, wrong, describe_fully(source))
    return result


def _accepted(hook: Any, context: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(hook).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return context
    return {name: value for name, value in context.items() if name in parameters}
