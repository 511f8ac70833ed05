"""Evaluates all datasets at the same time, each with its own sampling and rewards.

A sample without a score is left out of the averages and counted in the metrics: a failed reward is not a
zero. A weight push aborts no sample: each continues, and its version spans tell which version sampled a
token.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from slime.arguments import PluginArgs
from slime.arguments.groups.eval_config import EvalDatasetConfig
from slime.data.dataset import Dataset
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.prompt_formats import evaluation_format
from slime.rollout.prompt_groups import Group, copy_sample, index_of
from slime.utils.async_utils import all_or_none
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.reward_failure import infra_error
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

RunGroup = Callable[..., Awaitable[Group]]


async def evaluate(args: PluginArgs, run_group: RunGroup) -> RolloutFnEvalOutput:
    """{name: {"rewards", "truncated", "samples"}} for each dataset; `run_group` is generate_and_rm_group."""
    results = await all_or_none([_evaluate_dataset(args, config, run_group) for config in args.eval_datasets])
    data, metrics = {}, {}
    for config, (result, num_failed) in zip(args.eval_datasets, results, strict=True):
        data[config.name] = result
        if num_failed:
            metrics[f"eval/{config.name}/reward_failures"] = num_failed
        versions = {version for sample in result["samples"] for version, _, _ in sample.version_spans}
        if len(versions) > 1:
            what = f"its tokens are of {sorted(versions)}"
            logger.warning("Evaluation %s overlapped a weight push: %s", config.name, what)
            metrics[f"eval/{config.name}/weight_versions"] = len(versions)
    return RolloutFnEvalOutput(data=data, metrics=metrics or None)


async def _evaluate_dataset(
    args: PluginArgs, config: EvalDatasetConfig, run_group: RunGroup
) -> tuple[dict[str, Any], int]:
    # On this thread, although it blocks the loop once: fast tokenizers must not be used by two threads.
    groups = make_groups(config, load_eval_dataset(args, config))
    params = eval_sampling_params(args, config)

    async def ask(group: Group) -> Group:
        limit = asyncio.timeout(config.eval_task_timeout)
        try:
            async with limit:
                return await run_group(args, group, dict(params), evaluation=True)
        except TimeoutError:
            if not limit.expired():
                raise
        for sample in flatten_samples(group):
            if sample.reward is None:
                sample.reward_failure = infra_error(f"eval_task_timeout of {config.eval_task_timeout:g} s")
        return group

    done = await all_or_none([ask(group) for group in groups])
    samples = sorted(flatten_samples(done), key=index_of)
    scored = [s for s in samples if s.reward is not None]
    if not scored:
        failure = samples[0].reward_failure
        cause = failure.reason if failure else samples[0].status.value
        raise RuntimeError(f"evaluation {config.name}: none of {len(samples)} samples has a score: {cause}.")
    num_failed = len(samples) - len(scored)
    if num_failed:
        logger.warning("Evaluation %s: %d of %d samples have no score", config.name, num_failed, len(samples))
    key = args.eval_reward_key or args.reward_key
    result = {
        "rewards": [s.reward[key] if key and isinstance(s.reward, dict) else s.reward for s in scored],
        "truncated": [s.status is Sample.Status.TRUNCATED for s in scored],
        "samples": scored,
    }
    return result, num_failed


def make_groups(config: EvalDatasetConfig, dataset: Dataset) -> list[Group]:
    """Return one group per prompt, with the dataset's metadata, reward and generate function."""
    count = config.n_samples_per_eval_prompt or 1
    groups: list[Group] = []
    for number, prompt in enumerate(dataset.origin_samples):
        group: Group = []
        for copy_number in range(count):
            sample = copy_sample(prompt)
            sample.group_index, sample.index = number, number * count + copy_number
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path
            group.append(sample)
        groups.append(group)
    return groups


def eval_sampling_params(args: PluginArgs, config: EvalDatasetConfig) -> dict[str, Any]:
    """Return the dataset's sampling parameters without the ones it leaves open."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "repetition_penalty",
    )
    params = {name: getattr(config, name) for name in (*names, "skip_special_tokens")}
    params["max_new_tokens"] = config.max_response_len
    params["no_stop_trim"] = True if config.no_stop_trim is None else config.no_stop_trim
    params["spaces_between_special_tokens"] = False
    return {name: value for name, value in params.items() if value is not None}


_datasets: dict[tuple[Any, ...], Dataset] = {}


def load_eval_dataset(args: PluginArgs, config: EvalDatasetConfig) -> Dataset:
    """Read a dataset once per process: evaluation uses the same files many times."""
    key = (*config.cache_key, args.hf_checkpoint, args.eval_max_prompt_len)
    if key not in _datasets:
        needs_tokenizer = config.apply_chat_template or args.eval_max_prompt_len is not None
        _datasets[key] = Dataset(
            config.path,
            load_tokenizer(args.hf_checkpoint) if needs_tokenizer else None,
            load_processor(args.hf_checkpoint) if config.multimodal_keys else None,
            args.eval_max_prompt_len,
            fmt=evaluation_format(args, config),
            flag=f"evaluation dataset {config.name},",
            length_flag="--eval-max-prompt-len",
        )
    return _datasets[key]
