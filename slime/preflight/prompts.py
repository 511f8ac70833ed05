"""Checks that prompt rows can be used, and that their lengths fit the model and the flags."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments import Args
from slime.arguments.groups.data import DEFAULT_DATA_SOURCE
from slime.arguments.run_info import RunInfo, plugin_args
from slime.catalog.engines import ENGINES
from slime.data.dataset import check_prompt_file, prompt_lengths
from slime.data.prompt_rows import PromptFormat, row_to_sample
from slime.data.prompt_sources import read_rows
from slime.data.row_checks import PromptUse
from slime.preflight.findings import Finding, Kind, error_of
from slime.rollout.collection.conversations import describe_skipped
from slime.rollout.prompt_formats import EARLY_ROWS, TRAIN_ON_ROWS, prompt_files, training_format
from slime.utils.misc import load_function
from slime.utils.models.model_config import context_of
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample, flatten_samples

LOOKED_AT = 1000  # rows whose length is measured
_TOKENIZED = 100  # rows of a supervised run, which may be long


def check_rows(args: Args) -> Iterator[Finding]:
    """Check the keys of rows, and find rows that no rollout could use, with file and line."""
    for subject, path, fmt in prompt_files(args):
        try:
            first = next(iter(read_rows(path)), None)
            if first is None:
                yield Finding("error", subject, f"{path}: no rows; the file (or its slice) is empty.")
                continue
            missing = list(_missing_keys(*first, fmt))
            yield from missing
            if not missing:
                check_prompt_file(path, fmt, max_rows=EARLY_ROWS)
        except (ValueError, FileNotFoundError) as error:
            yield error_of(subject, error)


def _missing_keys(place: object, row: dict[str, object], fmt: PromptFormat) -> Iterator[Finding]:
    prompt = None if fmt.prompt_template is not None else fmt.input_key  # templates are checked by row
    for flag, key in (("--input-key", prompt), ("--label-key", fmt.label_key)):
        if key is not None and key not in row:
            text = f"{place}: no column {key!r}; the row has {sorted(row)}: name one of them."
            yield Finding("error", flag, text)


def reads_prompts(args: Args) -> bool:
    """Return whether slime itself turns the rows of --prompt-data into prompts."""
    ours = args.rollout_global_dataset and args.data_source_path == DEFAULT_DATA_SOURCE
    return args.prompt_data is not None and ours and not args.load_debug_rollout_data


def first_samples(args: Args, count: int) -> Iterator[Sample]:
    """Return the first prompts as samples, as the data source would make them."""
    fmt = training_format(args)
    tokenizer = load_tokenizer(args.hf_checkpoint) if fmt.apply_chat_template else None
    for place, row in itertools.islice(read_rows(args.prompt_data or ()), count):
        yield row_to_sample(row, fmt, tokenizer, None, where=place)


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Lengths of the first prompts in tokens. `whole`: these are all prompts."""

    tokens: tuple[int, ...]
    whole: bool


def usual_length(args: Args) -> float | None:
    """Return the median length of the first prompts in tokens; None: none can be read now."""
    try:
        readable = reads_prompts(args) and args.hf_checkpoint and not args.multimodal_keys
        return statistics.median(measure(args, 50).tokens) if readable else None
    except Exception:  # the check of the prompt files reports what is wrong
        return None


def measure(args: Args, count: int) -> PromptLengths:
    samples = list(first_samples(args, count + 1))
    lengths = prompt_lengths(samples[:count], load_tokenizer(args.hf_checkpoint))
    return PromptLengths(tuple(lengths), whole=len(samples) <= count)


def check_lengths(args: Args) -> Iterator[Finding]:
    """Report statistics of the first prompts; it is an error if all are too long, a warning if some are."""
    if not reads_prompts(args) or args.multimodal_keys or not args.hf_checkpoint:
        return
    if args.rollout_function_path in TRAIN_ON_ROWS:
        yield from _check_trained_rows(args)
    use = training_format(args).use
    if use is not PromptUse.ENGINE and args.rollout_max_prompt_len is None:
        return  # user functions and supervised losses have their own use of rows
    found = measure(args, LOOKED_AT)
    middle = f"median {statistics.median(found.tokens):.0f}"
    seen = f"{'' if found.whole else 'first '}{len(found.tokens)} prompts"
    text = f"{seen}: {min(found.tokens)} to {max(found.tokens)} tokens, {middle}"
    yield Finding("note", "--prompt-data", text)
    if args.rollout_max_prompt_len is not None:
        yield from _left_out(found, args.rollout_max_prompt_len)
    if use is PromptUse.ENGINE:
        yield from _beyond_context(args, found)


def _check_trained_rows(args: Args) -> Iterator[Finding]:
    """Report which of the first rows a supervised run leaves out and why, and the lengths of the others."""
    maker = args.rollout_function_path.rpartition(".")[0] + ".group_maker"
    make_group = load_function(maker)(plugin_args(args, RunInfo("preflight", "")))
    rows = list(first_samples(args, _TOKENIZED + 1))
    made = [make_group([row]) for row in rows[:_TOKENIZED]]
    seen = f"{'' if len(made) == len(rows) else 'the first '}{len(made)} rows"
    skipped = Counter(one for one in made if isinstance(one, str))
    lengths = [len(one.tokens) for one in flatten_samples(one for one in made if not isinstance(one, str))]
    if skipped:
        kind: Kind = "warning" if lengths or len(rows) > len(made) else "error"
        why = describe_skipped(skipped)
        yield Finding(kind, "--prompt-data", f"{skipped.total()} of {seen} are left out ({why}).")
    if not lengths:
        return
    yield Finding("note", "--prompt-data", f"{seen}: {min(lengths)} to {max(lengths)} tokens")
    context = context_of(args.hf_checkpoint or "")
    if context is not None and (count := sum(length > context for length in lengths)):
        text = f"{count} of {len(lengths)} texts are longer than the model's context: leave them out"
        yield Finding("warning", "--prompt-data", f"{text} with --rollout-max-context-len {context}.")


def _left_out(found: PromptLengths, limit: int) -> Iterator[Finding]:
    count = sum(length > limit for length in found.tokens)
    which = f"prompts are longer than --rollout-max-prompt-len {limit}"
    if count == len(found.tokens):
        kind: Kind = "error" if found.whole else "warning"
        text = f"all {count} {which}; the shortest has {min(found.tokens)} tokens: raise it."
        yield Finding(kind, "--prompt-data", text)
    elif count:
        yield Finding("note", "--prompt-data", f"{count} of {len(found.tokens)} {which} and left out")


def _beyond_context(args: Args, found: PromptLengths) -> Iterator[Finding]:
    limits = [args.rollout_max_context_len, context_of(args.hf_checkpoint or "")]
    context = min((limit for limit in limits if limit is not None), default=None)
    if context is None:
        return
    kept = [n for n in found.tokens if n <= (args.rollout_max_prompt_len or n)]
    count = sum(length >= context for length in kept)
    if count:
        # Servers of another kind may stretch the context by flags of their own.
        hopeless = count == len(kept) and found.whole and not ENGINES[args.rollout_engine].takes_sglang_flags
        text = (
            f"{count} of {len(kept)} prompts have up to {max(kept)} tokens, the model's context is {context}:"
            f" no room for a response; filter them with --rollout-max-prompt-len {context - 1} or less."
        )
        yield Finding("error" if hopeless else "warning", "--prompt-data", text)
    answer = args.rollout_max_response_len or 0
    cut = sum(length < context < length + answer for length in kept)
    if cut:
        after = f"{answer} tokens after the prompt go beyond the context of {context}"
        text = f"{after} for {cut} of {len(kept)} prompts: their responses are truncated earlier."
        yield Finding("warning", "--rollout-max-response-len", text)
