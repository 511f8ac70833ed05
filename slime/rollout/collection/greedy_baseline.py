"""Adds a greedy response to each group, whose reward is the baseline of remax; it is never trained on."""

from collections.abc import Awaitable, Callable
from typing import Any

from slime.algorithms.reward_shaping import GREEDY_REWARD_KEY
from slime.arguments import PluginArgs
from slime.rollout.generation.policy_requests import not_trained
from slime.rollout.prompt_groups import Group, first_sample, without_response
from slime.utils.async_utils import all_or_none
from slime.utils.types import Sample, flatten_samples

GenerateGroup = Callable[[PluginArgs, Group, dict[str, Any]], Awaitable[Group]]


async def with_greedy_baseline(
    args: PluginArgs, group: Group, sampling_params: dict[str, Any], generate_group: GenerateGroup
) -> Group:
    """Generate the group and a greedy response, whose reward is written into every sample's metadata.

    If the greedy response is aborted, the group is aborted too and measures it when it returns. If its reward
    fails, the group fails like with any other failed reward.
    """
    if GREEDY_REWARD_KEY in first_sample(group).metadata:
        return await generate_group(args, group, sampling_params)
    greedy_params = {**sampling_params, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    greedy = without_response(first_sample(group))
    greedy.metadata["greedy_baseline"] = True

    async def answer_greedily() -> Group:
        with not_trained():
            return await generate_group(args, [greedy], greedy_params)

    generated, answers = await all_or_none([generate_group(args, group, sampling_params), answer_greedily()])
    greedy_samples = flatten_samples(answers)
    failure = next((s.reward_failure for s in greedy_samples if s.reward_failure is not None), None)
    samples = flatten_samples(generated)
    if failure is not None:
        samples[0].reward_failure = failure
    elif all(s.reward is not None for s in greedy_samples):
        reward = sum(s.get_reward_value(args) for s in greedy_samples) / len(greedy_samples)
        for sample in samples:
            sample.metadata[GREEDY_REWARD_KEY] = reward
    else:
        samples[0].status = Sample.Status.ABORTED
    return generated
