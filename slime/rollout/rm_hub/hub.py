"""Which reward scores a sample, and calling it: custom functions first, then the built-in types by name."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.observability.metrics import NOT_COMPARED_KEY
from slime.rollout.groups import describe_fully
from slime.rollout.rm_hub.answers import answer_text
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.rm_hub.workers.checks import box_of, check
from slime.utils.loop_watch import loop_watch
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.types import RewardFailure, Sample, infra_error, invalid

CUSTOM_RM = "--custom-rm-path"
_BOXED = "boxed_"
_MAX_REWARD_THREADS = 64
_DAPO_WRONG = {"score": -1.0, "acc": False, "pred": "[TOO LARGE]"}


async def async_rm(args: PluginArgs, sample: Sample, **kwargs: Any) -> Any:
    """What the sample's reward function returns: a number, a dict or a RewardFailure."""
    path = custom_path_of(args, sample)
    if path is not None:
        return await call_custom(args, path, sample, **kwargs)
    rm_type = rm_type_of(args, sample)
    reward = _reward_of_type(rm_type.removeprefix(_BOXED))
    sample.metadata.pop(NOT_COMPARED_KEY, None)  # of an earlier answer
    response: str | RewardFailure = answer_text(args, sample)
    if rm_type.startswith(_BOXED) and reward not in (_math, _deepscaler):  # those read nothing but the box
        response = await box_of(args, sample, response)
        if isinstance(response, RewardFailure):
            return response
        if reward is _dapo and "answer" not in response.lower():
            response = f"Answer: {response}"  # the box is the answer, so it needs no line that says so
    return await reward(args, sample, response)


async def batched_async_rm(args: PluginArgs, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """One value per sample. With --group-rm the custom function
    sees the group; otherwise each sample alone.
    """
    if scores_groups(args, samples):
        values = await call_custom(args, args.custom_rm_path, list(samples), **kwargs)
        return _one_per_sample(args.custom_rm_path, values, samples)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


def scores_groups(args: PluginArgs, samples: Sequence[Sample]) -> bool:
    """Only --group-rm asks for the batch signature; a function
    named by the sample itself is always single.
    """
    return bool(args.group_rm and args.custom_rm_path) and not any(
        sample.custom_rm_path for sample in samples
    )


def custom_path_of(args: PluginArgs, sample: Sample) -> str | None:
    """The custom reward of this sample: its own wins over the run's, and any custom one over `rm_type`."""
    return sample.custom_rm_path or args.custom_rm_path


def rm_type_of(args: PluginArgs, sample: Sample) -> str:
    """The name of the sample's built-in reward: its metadata's `rm_type`, else --rm-type."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or args.rm_type or "").strip()
    if not rm_type:
        raise RewardConfigError(
            f"sample {sample.index} has no reward: set --rm-type, --custom-rm-path or rm_type in its metadata"
        )
    return rm_type


async def call_custom(args: PluginArgs, path: str, subject: Any, **kwargs: Any) -> Any:
    """Call a user's reward function, async or plain, with the deadline of a
    generation; a mistake in it ends the run.
    """
    function = load_function(path)
    try:
        async with asyncio.timeout(args.generate_timeout_s) as deadline:
            with plugin_call(CUSTOM_RM, path, lambda: describe_fully(subject), keep=(RewardConfigError,)):
                if inspect.iscoroutinefunction(function):
                    return await loop_watch.run(f"{CUSTOM_RM} {path}", function(args, subject, **kwargs))
                value = await _in_thread(lambda: function(args, subject, **kwargs))
                return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if not deadline.expired():
            raise  # a time-out of the function's own
        return infra_error(f"{path} did not return within --generate-timeout-s {args.generate_timeout_s:g}")


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a plain function beside the loop. The thread is a daemon:
    one that hangs must not hold up our exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def deliver(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def work() -> None:
        with _thread_slots:
            try:
                method, value = future.set_result, call()
            except (Exception, SystemExit) as error:
                method, value = future.set_exception, error
                if isinstance(error, StopIteration):  # no future takes one
                    value = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, method, value)

    threading.Thread(target=work, name="reward-function", daemon=True).start()
    return await future


_thread_slots = threading.BoundedSemaphore(_MAX_REWARD_THREADS)


def _one_per_sample(path: str, values: Any, samples: Sequence[Sample]) -> list[Any]:
    if isinstance(values, RewardFailure):
        return [values] * len(samples)
    try:
        listed = None if isinstance(values, (str, dict)) else list(values)
    except TypeError:
        listed = None
    if listed is None:
        complaint = f"returned {type(values).__name__} for a group: return a list with one reward per sample"
        wrong_return(CUSTOM_RM, path, complaint, describe_fully(samples))
    if len(listed) != len(samples):
        complaint = f"returned {len(listed)} rewards for {len(samples)} samples"
        wrong_return(CUSTOM_RM, path, complaint, describe_fully(samples))
    return listed


def _reward_of_type(rm_type: str) -> Callable[[Any, Sample, str], Awaitable[Any]]:
    if rm_type not in RM_TYPES:
        near = difflib.get_close_matches(rm_type, RM_TYPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardConfigError(
            f"unknown --rm-type {rm_type!r}: {hint}known types are {', '.join(sorted(RM_TYPES))}, "
            f"each also with the prefix {_BOXED!r}"
        )
    return RM_TYPES[rm_type]


def _missing_label(rm_type: str, sample: Sample) -> Any:
    return invalid(f"--rm-type {rm_type} needs a label and sample {sample.index} has none: set --label-key")


async def _remote(args: PluginArgs, sample: Sample, response: str) -> Any:
    return await remote_rm(args, sample, response=response)


async def _math(args: PluginArgs, sample: Sample, response: str) -> Any:
    if importlib.util.find_spec("math_verify") is None:
        raise RewardConfigError("--rm-type math needs the math-verify package: pip install 'slime[math]'")
    if sample.label in (None, ""):
        return _missing_label("math", sample)
    return await check(args, sample, "math_check:check_math", response, str(sample.label))


async def _deepscaler(args: PluginArgs, sample: Sample, response: str) -> Any:
    if sample.label in (None, ""):
        return _missing_label("deepscaler", sample)
    return await check(args, sample, "deepscaler:get_deepscaler_rule_based_reward", response, sample.label)


async def _dapo(args: PluginArgs, sample: Sample, response: str) -> Any:
    if sample.label in (None, ""):
        return _missing_label("dapo", sample)
    return await check(
        args, sample, "math_dapo_utils:compute_score", response, sample.label, wrong=dict(_DAPO_WRONG)
    )


async def _f1(args: PluginArgs, sample: Sample, response: str) -> Any:
    if sample.label is None:
        return _missing_label("f1", sample)
    outcome = await check(args, sample, "f1:f1_score", response, str(sample.label), wrong=(0.0, 0.0, 0.0))
    return outcome if isinstance(outcome, RewardFailure) else outcome[0]


async def _gpqa(args: PluginArgs, sample: Sample, response: str) -> Any:
    if sample.label is None and "correct_letter" not in sample.metadata:
        return _missing_label("gpqa", sample)
    given = _entries(sample.metadata, "choices", "valid_letters", "correct_letter")
    return await check(args, sample, "gpqa:compute_gpqa_reward", response, sample.label, given, wrong=0.0)


async def _ifbench(args: PluginArgs, sample: Sample, response: str) -> Any:
    given = _entries(sample.metadata, "instruction_id_list", "kwargs")
    return await check(
        args, sample, "ifbench:compute_ifbench_reward", response, sample.label, given, wrong=0.0
    )


def _entries(metadata: dict[str, Any], *names: str) -> dict[str, Any]:
    """What a check reads of the metadata: the rest may be large, or
    of a kind that its worker does not know.
    """
    return {name: metadata[name] for name in names if name in metadata}


async def _random(args: PluginArgs, sample: Sample, response: str) -> int:
    """A coin that a resumed run tosses the same way: it depends on the seed, the sample and what it said."""
    seed = f"{args.rollout_seed}/{sample.index}/{response}".encode(
        errors="surrogatepass"
    )  # half a character is no error
    return random.Random(seed).randint(0, 1)


RM_TYPES: dict[str, Callable[[Any, Sample, str], Awaitable[Any]]] = {
    "remote_rm": _remote,
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "ifbench": _ifbench,
    "random": _random,
}
