"""Every plug-in point as data: its flag, how it is called and when; checked before a run starts."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slime.arguments import Args
from slime.utils.column_rewards import columns_asked, takes_columns
from slime.utils.misc import load_function

Style = Literal["sync", "async", "either", "class"]


@dataclass(frozen=True)
class PluginPoint:
    """One place where a user's function takes part.

    Example: `--custom-generate-function-path` is awaited as `fn(args, sample, sampling_params)`, so its entry
    has positional=("args", "sample", "sampling_params") and style="async". A function may name its parameters
    as it likes where they are passed by position, and may take more if those have defaults.
    """

    flag: str  # the name in args
    positional: tuple[str, ...]  # passed by position, in this order
    returns: str
    when: str
    style: Style = "sync"
    keywords: tuple[str, ...] = ()  # passed by name
    optional: tuple[str, ...] = ()  # passed by name to functions that have such a parameter
    methods: tuple[str, ...] = ()  # methods that an object of the class must have
    columns: bool = False  # may have TRL's signature, with lists

    @property
    def option(self) -> str:
        return "--" + self.flag.replace("_", "-")

    @property
    def call(self) -> str:
        """The call as documented for users: `await fn(args, sample, sampling_params, [evaluation=])`."""
        parts = [
            *self.positional,
            *(f"{name}=" for name in self.keywords),
            *(f"[{name}=]" for name in self.optional),
        ]
        start = {"async": "await fn", "class": "cls"}.get(self.style, "fn")
        return f"{start}({', '.join(parts)})"


PLUGIN_POINTS = (
    PluginPoint(
        "rollout_function_path",
        positional=("args", "rollout_id", "data_source"),
        keywords=("evaluation",),
        returns="RolloutFnTrainOutput, or a list of samples or groups",
        when="once per rollout: makes all of its samples",
    ),
    PluginPoint(
        "eval_function_path",
        positional=("args", "rollout_id", "data_source"),
        keywords=("evaluation",),
        returns="RolloutFnEvalOutput, or its data dict",
        when="at each evaluation",
    ),
    PluginPoint(
        "data_source_path",
        positional=("args",),
        style="class",
        returns="an object with get_samples(n), add_samples(groups), save(rollout_id), load(rollout_id)",
        when="once at start",
        methods=("get_samples", "add_samples", "save", "load"),
    ),
    PluginPoint(
        "router_middleware_paths",
        positional=("args",),
        style="class",
        returns="an object with `async handle(request, forward)`, as slime.engines.middleware says",
        when="once at start; then `handle` on each request and response that passes the built-in balancer",
        methods=("handle",),
    ),
    PluginPoint(
        "custom_generate_function_path",
        positional=("args", "sample", "sampling_params"),
        style="async",
        returns="Sample, or several that share a rollout_id",
        when="for each sample, instead of one call of the engine",
        optional=("evaluation",),
    ),
    PluginPoint(
        "rollout_sample_hook_path",
        positional=("args", "sample"),
        style="either",
        returns="Sample, or None to keep it",
        when="on each generated sample, before its reward",
        optional=("rollout_id", "evaluation"),
    ),
    PluginPoint(
        "custom_rm_path",
        positional=("args", "sample"),
        style="either",
        returns="a number, a dict (see --reward-key), invalid(reason) or infra_error(reason)",
        when="on each sample; with --group-rm the second argument is the list of a group's samples, and so "
        "is the result; in TRL's signature, `fn(prompts, completions, **columns)`, once for each group, and "
        "the result is a list",
        columns=True,
    ),
    PluginPoint(
        "dynamic_sampling_filter_path",
        positional=("args", "samples"),
        returns="DynamicFilterOutput, or a bool",
        when="on each finished group: keep it or drop it",
    ),
    PluginPoint(
        "curriculum",
        positional=("args", "epoch", "samples", "pass_rates"),
        returns="the places of all samples in the order in which the epoch visits them",
        when="at the start of each epoch; a pass rate is the mean reward of a prompt's latest group, or None",
    ),
    PluginPoint(
        "buffer_filter_path",
        positional=("args", "rollout_id", "buffer", "num_samples"),
        returns="the groups that it took out of the buffer",
        when="before new prompts are fetched",
    ),
    PluginPoint(
        "rollout_sample_filter_path",
        positional=("args", "groups"),
        returns="nothing; sets sample.remove_sample to keep a sample out of the loss",
        when="at the end of a rollout, on the groups of the batch",
    ),
    PluginPoint(
        "rollout_all_samples_process_path",
        positional=("args", "all_groups", "data_source"),
        returns="nothing",
        when="at the end of a rollout, on all finished groups, dropped ones included",
    ),
    PluginPoint(
        "custom_reward_post_process_path",
        positional=("args", "samples"),
        returns="(raw_rewards, rewards), one of each per sample",
        when="instead of group normalisation",
    ),
    PluginPoint(
        "custom_convert_samples_to_train_data_path",
        positional=("args", "samples"),
        returns="the train data (a RolloutBatch)",
        when="instead of the built-in conversion of samples",
    ),
    PluginPoint(
        "custom_rollout_log_function_path",
        positional=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        returns="true to skip the default metrics",
        when="after each rollout",
    ),
    PluginPoint(
        "custom_eval_rollout_log_function_path",
        positional=("rollout_id", "args", "data", "extra_metrics"),
        returns="true to skip the default metrics",
        when="after each evaluation",
    ),
    PluginPoint(
        "rollout_data_postprocess_path",
        positional=("args", "rollout_id", "rollout_data"),
        returns="nothing; edits rollout_data in place",
        when="on every trainer rank, after advantages and before training",
    ),
    PluginPoint(
        "custom_advantage_function_path",
        positional=("args", "rollout_data"),
        returns='nothing; sets rollout_data["advantages"] and ["returns"]',
        when="instead of the advantage estimator",
    ),
    PluginPoint(
        "custom_policy_loss_function_path",
        positional=("args", "inputs"),
        returns="(loss per token, dict of per-token metrics)",
        when="for each micro-batch, with a slime.algorithms.policy_loss.PolicyInputs, instead of "
        "--policy-loss-type",
    ),
    PluginPoint(
        "custom_tis_function_path",
        positional=(),
        keywords=(
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
        returns="(pg_loss, loss masks with rejected tokens at 0, which leave policy, KL and entropy terms, "
        "dict of per-token metrics)",
        when="for each micro-batch, with --use-tis or --get-mismatch-metrics (then only for its metrics)",
    ),
    PluginPoint(
        "custom_pg_loss_reducer_function_path",
        positional=("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        returns="a callable: flat per-token losses -> their sum",
        when="for each micro-batch, for the policy-gradient term only",
    ),
    PluginPoint(
        "custom_loss_function_path",
        positional=("args", "batch", "logits", "sum_of_sample_mean"),
        returns="(loss, dict of metrics)",
        when="for each micro-batch, with --loss-type custom_loss; logits are not divided by "
        "--rollout-temperature",
    ),
    PluginPoint(
        "custom_update_weight_post_write_path",
        positional=("args", "version_dir", "rollout_engines"),
        returns="nothing",
        when="on every trainer rank when a version lies in version_dir, before the engines (their "
        "addresses) read it; with deltas also on the first rank alone, for full copies beside them and for "
        "the folder that a run takes over",
    ),
    PluginPoint(
        "custom_megatron_init_path",
        positional=("args",),
        returns="nothing",
        when="once on every rank of the Megatron trainer: process groups exist, the model is not built yet",
    ),
    PluginPoint(
        "custom_megatron_before_log_prob_hook_path",
        positional=("args", "model", "store_prefix"),
        returns="nothing",
        when='before each pass of the Megatron trainer that records log-probs; store_prefix is "", "ref_" '
        'or "teacher_"',
    ),
    PluginPoint(
        "custom_megatron_before_train_step_hook_path",
        positional=("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        returns="nothing",
        when="before each optimizer step of the Megatron trainer's policy; the scheduler offers get_lr() "
        "and num_steps",
    ),
    PluginPoint(
        "custom_model_provider_path",
        positional=("pre_process", "post_process"),
        returns="a slime.backends.megatron.modules.model.PackedGPTModel",
        when="for each chunk that a rank builds; `build` makes the usual one, a critic's head is put in "
        "afterwards",
        optional=("vp_stage", "config", "build"),
    ),
)

# The plug-in points that an evaluation dataset can set for itself.
DATASET_POINTS = ("custom_rm_path", "custom_generate_function_path")


def configured_plugins(args: Args) -> Iterator[tuple[PluginPoint, str, str]]:
    """Yield (point, path, flag that sets it) for all settings, including those of evaluation datasets."""
    points = {point.flag: point for point in PLUGIN_POINTS}
    for point in PLUGIN_POINTS:
        value = getattr(args, point.flag)
        for path in [value] if isinstance(value, str) else value or []:
            yield point, path, point.option
    for dataset in args.eval_datasets:
        for flag in DATASET_POINTS:
            path = getattr(dataset, flag)
            if path:
                yield points[flag], path, f"{flag} of evaluation dataset {dataset.name!r}"


def check_plugin(point: PluginPoint, path: str, where: str) -> Callable[..., Any]:
    """Load the object of one path and check it; ValueError where slime cannot call it."""
    expected = f"Expected {point.call}."
    found = _load(path, where, expected)
    if not callable(found):
        raise ValueError(
            f"{where} is {path}: found a {type(found).__name__}, which cannot be called. {expected}"
        )
    _check_style(point, found, path, where)
    _check_signature(point, found, path, where)
    missing = [name for name in point.methods if inspect.isclass(found) and not hasattr(found, name)]
    if missing:
        raise ValueError(
            f"{where} is {path}: the class has no {', '.join(missing)}. Expected {point.returns}."
        )
    return found


def _load(path: str, where: str, expected: str) -> Any:
    try:
        return load_function(path)
    except Exception as error:  # importing a plug-in runs its code, which may raise anything
        is_ours = isinstance(error, (ModuleNotFoundError, FileNotFoundError, AttributeError, ValueError))
        reason = error if is_ours else f"importing it raised {type(error).__name__}: {error}"
        raise ValueError(f"{where} is {path}: {reason}. {expected}") from error


def _check_style(point: PluginPoint, found: Callable[..., Any], path: str, where: str) -> None:
    wrong = ""
    if point.style == "async" and not _is_async(found):
        wrong = "it is awaited, but it is not async; write `async def`"
    if point.style == "sync" and _is_async(found):
        plain = "write a plain `def` (slime.utils.async_utils.run awaits inside it)"
        wrong = f"it is called without await, but it is async; {plain}"
    if wrong:
        raise ValueError(f"{where} is {path}: {wrong}. Expected {point.call}.")


def _is_async(found: Callable[..., Any]) -> bool:
    while isinstance(found, functools.partial):
        found = found.func
    found = inspect.unwrap(found)
    called = found if inspect.isroutine(found) or inspect.isclass(found) else type(found).__call__
    return inspect.iscoroutinefunction(called)


def _check_signature(point: PluginPoint, found: Callable[..., Any], path: str, where: str) -> None:
    if point.columns and takes_columns(found):
        try:
            columns_asked(found)
        except ValueError as error:
            raise ValueError(f"{where} is {path}, a reward in TRL's signature: {error}.") from None
        return
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return  # a builtin without a signature: nothing to bind
    try:
        signature.bind(*point.positional, **dict.fromkeys(point.keywords))
    except TypeError as error:
        name = path.rpartition(":")[2].rpartition(".")[2]
        raise ValueError(
            f"{where} is {path}: expected {point.call}, found {name}{signature} ({error})."
        ) from None
