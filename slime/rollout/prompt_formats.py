"""Derives the prompt format of training and of each evaluation, and checks prompts before the start."""

from collections.abc import Iterator
from typing import Any

from slime.arguments import Args, PluginArgs
from slime.arguments.groups.data import DEFAULT_DATA_SOURCE
from slime.arguments.groups.eval_config import EvalDatasetConfig
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.environments import SOURCE
from slime.data.prompt_rows import PromptFormat
from slime.data.row_checks import PromptUse
from slime.utils.column_rewards import ColumnsAsked, columns_asked, takes_columns
from slime.utils.misc import load_function

_GENERATING = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)
_OWN_GENERATE = (None, "slime.rollout.sglang_streaming_rollout.generate_streaming")
_SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"
_PREFERENCE = "slime.rollout.preference_rollout.generate_rollout"
TRAIN_ON_ROWS = (_SUPERVISED, _PREFERENCE)  # each is in a module that has a `group_maker`
# Rows that are looked at before processes start; others are read while engines load their weights.
EARLY_ROWS = 50_000


def prompt_files(args: Args | PluginArgs) -> Iterator[tuple[str, str | list[str], PromptFormat]]:
    """Everything that our own code reads prompts from: what names it, its file or files, and how."""
    ours = args.rollout_global_dataset and args.data_source_path == DEFAULT_DATA_SOURCE
    if args.prompt_data is not None and ours:
        yield "--prompt-data", args.prompt_data, training_format(args)
    for config in args.eval_datasets:
        yield f"evaluation dataset {config.name!r}", config.path, evaluation_format(args, config)


def is_conversation(args: Args | PluginArgs) -> bool:
    """Return whether the training rows are conversations, which supervised training renders."""
    return _training_use(args) is PromptUse.CONVERSATION


def training_format(args: Args | PluginArgs) -> PromptFormat:
    """The columns that the flags name, and who reads them."""
    use = _training_use(args)
    _check_template(use, args.apply_chat_template, args.multimodal_keys, "--prompt-data")
    pairs = args.rollout_function_path == _PREFERENCE
    # The prompt stands alone: in front of a completion, or as text without a template.
    apart = "prompt" in args.metadata_columns if pairs else args.label_key or args.loss_mask_type == "text"
    if use is PromptUse.CONVERSATION and apart:
        use = PromptUse.UNKNOWN
    return PromptFormat(
        **_columns(args, args),
        reward_columns=_reward_columns(args.custom_rm_path),
        use=use,
        rm_type=_label_reader(args) if args.rollout_function_path in _GENERATING else None,
        label_is_messages=pairs and use is PromptUse.CONVERSATION,
    )


def evaluation_format(args: Args | PluginArgs, config: EvalDatasetConfig) -> PromptFormat:
    """The format of the prompts of one evaluation dataset."""
    if config.path.startswith(SOURCE):
        return PromptFormat(use=PromptUse.OWN_CODE)  # rows of our own making, whatever columns a file has
    generate = config.custom_generate_function_path or args.custom_generate_function_path
    function = args.eval_function_path or args.rollout_function_path
    ours = function in _GENERATING
    use = PromptUse.ENGINE if ours and generate in _OWN_GENERATE else PromptUse.OWN_CODE
    _check_template(
        use, bool(config.apply_chat_template), config.multimodal_keys, f"evaluation dataset {config.name}"
    )
    return PromptFormat(
        **_columns(config, args),
        reward_columns=_reward_columns(config.custom_rm_path or args.custom_rm_path),
        use=use,
        rm_type=_label_reader(args, config) if ours else None,
    )


def _columns(data_args: Any, args: Args | PluginArgs) -> dict[str, Any]:
    """Return the columns of a dataset, as the flags or its own entry name them."""
    return {
        "input_key": data_args.input_key or "input",
        "label_key": data_args.label_key,
        "label_pattern": data_args.label_pattern,
        "metadata_key": data_args.metadata_key,
        "metadata_columns": tuple(data_args.metadata_columns or ()),
        "tool_key": data_args.tool_key,
        "multimodal_keys": data_args.multimodal_keys,
        "prompt_template": data_args.prompt_template,
        # an episode has a template of its own
        "apply_chat_template": bool(data_args.apply_chat_template) and args.env is None,
        "apply_chat_template_kwargs": data_args.apply_chat_template_kwargs or {},
    }


def _training_use(args: Args | PluginArgs) -> PromptUse:
    """A data source of the user's may turn rows into prompts of its own."""
    if args.load_debug_rollout_data or args.data_source_path != DEFAULT_DATA_SOURCE:
        return PromptUse.OWN_CODE
    if args.rollout_function_path in TRAIN_ON_ROWS:
        return PromptUse.CONVERSATION
    return PromptUse.ENGINE if calls_engine_itself(args) else PromptUse.OWN_CODE


def calls_engine_itself(args: Args | PluginArgs) -> bool:
    """Return whether slime's own code generates the responses."""
    return args.rollout_function_path in _GENERATING and args.custom_generate_function_path in _OWN_GENERATE


def _label_reader(args: Args | PluginArgs, config: EvalDatasetConfig | None = None) -> str | None:
    """The built-in reward, if none of the user's takes its place."""
    if args.custom_rm_path or (config is not None and config.custom_rm_path):
        return None
    if args.load_debug_rollout_data or args.data_source_path != DEFAULT_DATA_SOURCE:
        return None
    return (config.rm_type if config is not None else None) or args.rm_type or ""


def _reward_columns(path: str | None) -> ColumnsAsked | None:
    """Return the columns that a reward in TRL's signature reads; None: another signature, or no reward."""
    function = load_function(path) if path is not None else None
    return columns_asked(function) if function is not None and takes_columns(function) else None


def _check_template(use: PromptUse, template: bool, multimodal_keys: Any, what: str) -> None:
    if use is PromptUse.CONVERSATION and template:
        raise ValueError(f"{what}: supervised training needs messages; drop --apply-chat-template.")
    if use is PromptUse.ENGINE and multimodal_keys and not template:
        raise ValueError(f"{what}: --multimodal-keys makes messages of prompts; add --apply-chat-template.")
