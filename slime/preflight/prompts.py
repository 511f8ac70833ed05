"""The prompts: whether rows can be used, and how long they are beside what the model and the flags allow."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from slime.arguments import Args, PluginArgs, RunInfo, plugin_args
from slime.arguments.groups.data import DEFAULT_DATA_SOURCE
from slime.data.dataset import prompt_lengths
from slime.data.prompts import row_to_sample
from slime.data.reader import read_rows
from slime.preflight.report import Finding
from slime.rollout.prompt_formats import check_prompt_files, training_format
from slime.utils.model_config import context_of
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

LOOKED_AT = 1000  # rows whose length is measured


def check_rows(args: Args) -> Iterator[Finding]:
    """Rows that no rollout could use are told with file, line and key."""
    check_prompt_files(settings_of(args))
    yield from ()


def settings_of(args: Args) -> PluginArgs:
    """What plug-ins get, with a run that does not exist yet."""
    return plugin_args(args, RunInfo(run_id="preflight", run_dir=args.run_dir))


def reads_prompts(args: Args) -> bool:
    """Whether the rows of --prompt-data become prompts by our own code."""
    ours = args.rollout_global_dataset and args.data_source_path == DEFAULT_DATA_SOURCE
    return args.prompt_data is not None and ours and not args.load_debug_rollout_data


def first_samples(args: Args, count: int) -> list[Sample]:
    """The first prompts as samples, as the data source would make them."""
    settings = settings_of(args)
    fmt = training_format(settings)
    tokenizer = load_tokenizer(args.hf_checkpoint) if fmt.apply_chat_template else None
    rows = itertools.islice(read_rows(args.prompt_data or ()), count)
    return [row_to_sample(row, fmt, tokenizer, None, where=place) for place, row in rows]


def check_lengths(args: Args) -> Iterator[Finding]:
    """Statistics of the first prompts; all too long is an error, some are a warning."""
    if not reads_prompts(args) or args.multimodal_keys or not args.hf_checkpoint:
        return
    samples = first_samples(args, LOOKED_AT)
    if not samples:
        yield Finding("error", "--prompt-data", f"{args.prompt_data} has no rows.")
        return
    lengths = prompt_lengths(samples, load_tokenizer(args.hf_checkpoint))
    more = "first " if len(samples) == LOOKED_AT else ""
    yield Finding(
        "note",
        "--prompt-data",
        f"{more}{len(samples)} prompts: {min(lengths)} to {max(lengths)} tokens, median "
        f"{statistics.median(lengths):.0f}",
    )
    yield from _too_long(lengths, args.rollout_max_prompt_len, "--rollout-max-prompt-len", left_out=True)
    context = args.rollout_max_context_len or context_of(args.hf_checkpoint)
    if context is not None:
        room = context - 1
        yield from _too_long(lengths, room, f"the model's context of {context} tokens", left_out=False)
        answer = args.rollout_max_response_len or 0
        cut = sum(length + answer > context for length in lengths)
        if cut and min(lengths) <= room:
            yield Finding(
                "warning",
                "--rollout-max-response-len",
                f"{answer} tokens after the prompt go beyond the context of {context} for {cut} of "
                f"{len(lengths)} prompts: their answers are cut earlier.",
            )


def _too_long(lengths: list[int], limit: int | None, name: str, *, left_out: bool) -> Iterator[Finding]:
    if limit is None:
        return
    count = sum(length > limit for length in lengths)
    if count == len(lengths):
        yield Finding(
            "error",
            "--prompt-data",
            f"all {count} prompts that were looked at are longer than {name} ({limit}); the shortest has "
            f"{min(lengths)} tokens: raise it, or shorten the prompts.",
        )
    elif count and left_out:
        yield Finding(
            "note", "--prompt-data", f"{count} of {len(lengths)} prompts are longer than {name} and left out"
        )
    elif count:
        yield Finding(
            "warning", "--prompt-data", f"{count} of {len(lengths)} prompts do not fit into {name}."
        )
