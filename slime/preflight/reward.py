"""The reward, tried once before anything starts: on a made-up
answer, and on the label itself as the answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from slime.arguments import Args, PluginArgs
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.rewards import find_reward
from slime.preflight.prompts import first_samples, reads_prompts, settings_of
from slime.preflight.report import Finding
from slime.rollout.rm_hub import score_samples
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

MADE_UP = "I do not know."


def check_reward(args: Args) -> Iterator[Finding]:
    """Whether it returns a score at all, and whether the right answer
    gets a better one than a made-up answer.
    """
    if not _scores_answers(args):
        return
    subject = "--custom-rm-path" if args.custom_rm_path else "--rm-type"
    samples = first_samples(args, 1)
    if not samples:
        return
    if not (args.custom_rm_path or args.rm_type or samples[0].metadata.get("rm_type")):
        yield Finding(
            "error",
            "--rm-type",
            "no reward is given: set --rm-type, --custom-rm-path or rm_type in the rows' metadata.",
        )
        return
    row = find_reward(args.rm_type)
    if args.group_rm or (row is not None and row.is_remote and not args.custom_rm_path):
        return  # a group needs a group; a judge elsewhere may start later than this run
    settings = settings_of(args)
    made_up = _scored(settings, samples[0], MADE_UP)
    if made_up.reward_failure is not None:
        yield Finding("error", subject, f"it gave no score for {MADE_UP!r}: {made_up.reward_failure.reason}")
        return
    if samples[0].label in (None, ""):
        return
    right = _scored(settings, samples[0], right_answer(settings, samples[0]))
    yield from _compare(settings, subject, made_up, right)


def _scores_answers(args: Args) -> bool:
    """Only where our own code generates: a reward may read what a
    user's generate function leaves in the sample.
    """
    generates = args.rollout_function_path in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)
    return (
        generates
        and args.custom_generate_function_path is None
        and reads_prompts(args)
        and not args.multimodal_keys
    )


def right_answer(args: PluginArgs, sample: Sample) -> str:
    """The label in the form that a built-in reward looks for; a custom one gets it as it is."""
    label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    row = None if args.custom_rm_path else find_reward(sample.metadata.get("rm_type") or args.rm_type)
    if row is not None and (row.reads_box or (args.rm_type or "").startswith("boxed_")):
        boxed = str(label) if "\\boxed" in str(label) else f"\\boxed{{{label}}}"
        return f"</think> {boxed}"
    return f"Answer: {label}" if row is not None and row.reads_answer_line else str(label)


def _scored(args: PluginArgs, sample: Sample, answer: str) -> Sample:
    tried = copy.deepcopy(sample)
    tried.index = tried.group_index = 0
    tried.response, tried.status = answer, Sample.Status.COMPLETED
    tokenizer = load_tokenizer(args.hf_checkpoint)
    prompt = tried.prompt if isinstance(tried.prompt, str) else ""
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    tried.tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *tokens]
    tried.response_length, tried.rollout_log_probs = len(tokens), [0.0] * len(tokens)
    try:
        run(score_samples(args, [tried]))
    except RunStopped as error:
        raise ValueError(str(error)) from None
    finally:
        reset_breaker()
    return tried


def _compare(args: PluginArgs, subject: str, made_up: Sample, right: Sample) -> Iterator[Finding]:
    if right.reward_failure is not None:
        yield Finding(
            "warning", subject, f"it gave no score for the label itself: {right.reward_failure.reason}"
        )
        return
    low, high = (_number(sample.get_reward_value(args)) for sample in (made_up, right))
    if low is None or high is None:
        return
    shown = f"{high:g} for {_short(right.response)}, the label of the first row, and {low:g} for {MADE_UP!r}"
    if high > low:
        yield Finding("note", subject, f"it gives {shown}")
    else:
        yield Finding(
            "warning",
            subject,
            f"it gives {shown}: does the right answer score well? Look at the reward and the labels.",
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
