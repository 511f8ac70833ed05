"""Flags and rules of the prompts: where they are, what their columns mean, how many make up one rollout."""

import re
from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs, stays_on
from slime.catalog.curricula import CURRICULA
from slime.catalog.datasets import DATASET_FORMATS
from slime.utils.templates import template_parts

_FORMATS = "; ".join(f"{ending}: {row.help}" for ending, row in DATASET_FORMATS.items())
DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


# -- when flags have an effect
SHARED_DATASET = stays_on("rollout_global_dataset", harmless=True)


@dataclass
class DataFlags:
    """Data."""

    prompt_data: str | list[str] | None = flag(
        None,
        f"prompts ({_FORMATS}), also by https:// or s3://, with an optional row range: data.jsonl@[0:100]; "
        "several are joined",
        metavar="FILE",
    )
    rollout_batch_size: int | None = flag(None, "prompts per rollout (required)", ge=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt", ge=1)
    num_rollout: int | None = flag(None, "rollouts to run", ge=0)
    num_epoch: int | None = flag(None, "passes over the prompts, instead of --num-rollout", ge=1)
    start_rollout_id: int | None = flag(None, "first rollout id; default: after the loaded checkpoint", ge=0)
    rollout_shuffle: bool = flag(False, "shuffle prompts in each epoch", only_with=SHARED_DATASET)
    curriculum: str | None = flag(
        None,
        "order of the prompts within an epoch; "
        + "; ".join(f"{name}: {row.help}" for name, row in CURRICULA.items())
        + "; or your function",
        metavar="NAME",
        only_with=SHARED_DATASET,
    )
    rollout_seed: int = flag(
        42, "seed of the shuffle and of per-request sampling seeds; where --seed is given, that one", ge=0
    )
    input_key: str = flag("input", "column of the prompt (text or messages)")
    prompt_template: str | None = flag(
        None, "the prompt as text made of columns: 'Q: {question} A:', instead of --input-key", metavar="TEXT"
    )
    label_key: str | None = flag(None, "column of the label")
    label_pattern: str | None = flag(
        None,
        "regular expression that finds the label in its column; its group if it has one: '#### (.+)'",
        metavar="REGEX",
        only_with=needs("label_key"),
    )
    metadata_key: str = flag("metadata", "column of the metadata")
    metadata_columns: list[str] = flag([], "columns that go to the metadata; '*': all", metavar="KEY")
    tool_key: str = flag("tools", "column of the tools")
    apply_chat_template: bool = flag(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict = flag({}, "extra arguments of the chat template, as JSON")
    loss_mask_type: str = flag(
        "qwen",
        "chat family of SFT loss masks; text: no chat template, prompt and completion are plain text",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen", "text"),
    )
    data_source_path: str = flag(DEFAULT_DATA_SOURCE, "class that hands out prompts")
    rollout_global_dataset: bool = flag(
        True, "no shared dataset: the rollout function has prompts", off="--disable-rollout-global-dataset"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(None, "function: samples to train data")


def columns(draft: Draft) -> None:
    """Resolve a named curriculum; refuse an invalid template or pattern before any row is read."""
    if draft.curriculum in CURRICULA:
        draft.derive("curriculum", CURRICULA[draft.curriculum].function, f"curriculum {draft.curriculum}")
    if draft.prompt_template is not None:
        if draft.was_given("input_key"):
            raise ValueError("--input-key and --prompt-template both define the prompt; keep one.")
        check_template("--prompt-template", draft.prompt_template)
    if draft.label_pattern is not None:
        check_pattern("--label-pattern", draft.label_pattern)


def check_template(what: str, template: str) -> None:
    try:
        template_parts(template)
    except ValueError as error:
        raise ValueError(f"{what} is {template!r}: {error}.") from None


def check_pattern(what: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what} is {pattern!r}: not a regular expression ({error}).") from None


def length_of_run(draft: Draft) -> None:
    if draft.num_rollout is None and draft.num_epoch is None:
        raise ValueError("neither --num-rollout nor --num-epoch is set: give one of them.")
    if draft.num_rollout is not None and draft.num_epoch is not None:
        draft.idle.append(f"--num-epoch is {draft.num_epoch}, but --num-rollout says how long to train.")
        draft.derive("num_epoch", None, "--num-rollout says how long to train")
    if draft.num_epoch is not None and not draft.rollout_global_dataset:
        raise ValueError("--num-epoch needs the shared dataset; use --num-rollout instead.")
