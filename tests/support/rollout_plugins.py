"""Plug-ins that rollout tests name on the command line; each records how it was called."""

import asyncio
import copy

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample, infra_error, invalid

calls: dict[str, list] = {}


def record(name: str, *values) -> None:
    calls.setdefault(name, []).append(values)


async def token_sum(args, sample, **kwargs):
    record("token_sum", args, sample, kwargs)
    return float(sum(sample.tokens[-sample.response_length :]))


async def group_rank(args, samples, **kwargs):
    record("group_rank", samples)
    return [float(i) for i in range(len(samples))]


async def fails_for_odd_groups(args, sample, **kwargs):
    record("fails_for_odd_groups", sample.index, sample.metadata.get("attempt", 0))
    return invalid("odd") if sample.group_index % 2 else 1.0


async def fails_once(args, sample, **kwargs):
    return (
        infra_error("judge is down")
        if sample.group_index == 1 and not sample.metadata.get("attempt")
        else 1.0
    )


async def always_fails(args, sample, **kwargs):
    return infra_error("judge is down")


async def fixed_reward(args, sample, **kwargs):
    return 0.25


def drop_every_third(args, samples, **kwargs):
    record("drop_every_third", samples)
    assert all(isinstance(sample, Sample) for sample in samples)
    return DynamicFilterOutput(keep=samples[0].group_index % 3 != 0, reason="third")


async def fan_out(args, sample, sampling_params):
    """Two samples for one execution."""
    made = []
    for part in range(2):
        new = copy.deepcopy(sample)
        new.tokens = [5, 6]
        new.append_response_tokens(args, tokens=[20 + part], log_probs=[-0.1])
        new.status = Sample.Status.COMPLETED
        made.append(new)
    return made


async def wants_evaluation(args, sample, sampling_params, evaluation=False):
    record("wants_evaluation", evaluation, dict(sampling_params))
    sampling_params["temperature"] = 99  # must reach nobody else
    sample.tokens = [5, 6]
    sample.append_response_tokens(args, tokens=[7], log_probs=[-0.2])
    sample.status = Sample.Status.COMPLETED
    return sample


async def hangs_for_odd_groups(args, sample, sampling_params, evaluation=False):
    if sample.group_index % 2:
        await asyncio.Event().wait()
    return await wants_evaluation(args, sample, sampling_params, evaluation)


async def returns_nothing(args, sample, sampling_params):
    return None


def hook_in_place(args, sample, rollout_id):
    record("hook_in_place", rollout_id)
    sample.metadata["hooked"] = True


async def hook_async(args, sample, **kwargs):
    record("hook_async", sorted(kwargs))
    return sample


def hook_wrong(args, sample):
    return 3


def remove_first(args, groups):
    record("remove_first", groups)
    groups[0][0].remove_sample = True


def see_all(args, all_groups, data_source):
    record("see_all", all_groups, data_source)


def newest_first(args, rollout_id, buffer, num_samples):
    taken = buffer[-num_samples:][::-1]
    del buffer[-num_samples:]
    return taken


async def gives_up_once(args, sample, sampling_params):
    """The first attempt at group 1 ends aborted, as when an environment is lost."""
    sample.tokens = [5, 6]
    if sample.group_index == 1 and not sample.metadata.get("attempt"):
        sample.status = Sample.Status.ABORTED
        return sample
    sample.append_response_tokens(args, tokens=[7], log_probs=[-0.2])
    sample.status = Sample.Status.COMPLETED
    return sample


async def gives_up_twice(args, sample, sampling_params):
    """As a function of one's own does that met two weight pushes and sends nothing again."""
    record("gives_up_twice", sample.index, sample.response_length)
    sample.tokens = sample.tokens or [5, 6]
    sample.append_response_tokens(args, tokens=[20], log_probs=[-0.1])
    met = sum(index == sample.index for index, _ in calls["gives_up_twice"])
    sample.status = Sample.Status.ABORTED if met <= 2 else Sample.Status.COMPLETED
    return sample


async def never_ends(args, sample, sampling_params):
    """The default, up to the last token that is allowed."""
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})
