"""Makes batches from given conversations (supervised training, preference pairs) without generation."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from slime.arguments import PluginArgs
from slime.data.media import bare_messages
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.generation.sample_images import encode_prompt_with_images, pictures_of
from slime.rollout.prompt_groups import Group, Outcome, describe
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.media.image_tokens import encoder_of
from slime.utils.processing_utils import load_processor
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


def fill_batch(
    args: PluginArgs,
    rollout_id: int,
    data_source: Any,
    make_group: Callable[[Group], Group | str],
    *,
    what: str,
    metric: str,
) -> RolloutFnTrainOutput:
    """A batch of what `make_group` makes of rows; a row with a reason is left out and replaced."""
    groups: list[Group] = []
    skipped: Counter[str] = Counter()
    while len(groups) < args.rollout_batch_size:
        for row in data_source.get_samples(args.rollout_batch_size - len(groups)):
            made = make_group(row)
            if not isinstance(made, str):
                groups.append(made)
                continue
            skipped[made] += 1
            _settle(data_source, [row], "filtered", made)
            # A whole epoch without one usable row will not get better in the next.
            if not groups and 0 < len(data_source) <= skipped.total():
                rows = f"none of {len(data_source)} {what}"
                raise ValueError(f"--prompt-data: {rows} can be trained on ({describe_skipped(skipped)}).")
    if skipped:
        logger.warning("Rollout %d: %s left out: %s", rollout_id, what, describe_skipped(skipped))
    _settle(data_source, groups, "trained")
    metrics = {f"rollout/{metric}/skipped_{reason}": count for reason, count in skipped.items()}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics or None)


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Return the reasons why rows are left out, with their counts, as text."""
    return ", ".join(f"{reason.replace('_', ' ')}: {count}" for reason, count in skipped.items())


def conversation_of(prompt: Any, completion: Any) -> Messages:
    """Join a prompt and its completion, each of them text or messages, to one conversation."""
    parts: Messages = []
    for role, content in (("user", prompt), ("assistant", completion)):
        if not isinstance(content, (str, list)):
            what = "prompt" if role == "user" else "completion"
            raise ValueError(f"the {what} is {type(content).__name__}: write text, or a list of messages.")
        parts += [{"role": role, "content": content}] if isinstance(content, str) else content
    return parts


def write_tokens(
    args: PluginArgs, sample: Sample, messages: Any, masks: MultiTurnLossMaskGenerator
) -> str | None:
    """Put tokens and loss mask of a conversation into the sample, or return why it cannot be trained on.

    `messages` comes out of a row as it stands there: anything but a list of messages is refused.
    """
    tools = sample.metadata.get("tools")
    try:
        shown = bare_messages(messages) if pictures_of(sample) else messages
        token_ids, loss_mask = masks.get_loss_mask(shown, tools=tools)
        if pictures_of(sample):
            loss_mask = _with_images(args, sample, token_ids, loss_mask)
            token_ids = sample.tokens
    except ValueError as error:
        raise ValueError(f"{describe(sample)}: {error}") from error
    response_length = masks.get_response_lengths([loss_mask])[0]
    if response_length == 0:
        return "no_assistant_token"
    limits = (args.rollout_max_context_len, args.max_context_len)
    if any(limit is not None and len(token_ids) > limit for limit in limits):
        return "longer_than_context"
    sample.tokens, sample.response_length = token_ids, response_length
    sample.loss_mask = loss_mask[len(loss_mask) - response_length :]
    sample.status = Sample.Status.COMPLETED
    return None


def _with_images(args: PluginArgs, sample: Sample, ids: list[int], mask: list[int]) -> list[int]:
    """Expand the image tokens of a conversation in the sample; returns the mask of all its tokens."""
    processor = load_processor(str(args.hf_checkpoint))
    if processor is None:
        raise ValueError(f"--hf-checkpoint {args.hf_checkpoint} has no processor: it takes no images.")
    encode_prompt_with_images(sample, ids, processor)
    out: list[int] = []
    spans, media_ids = iter(sample.image_spans or ()), encoder_of(processor).media_ids
    for token, trained in zip(ids, mask, strict=True):
        if token in media_ids:
            start, end = next(spans)
            out += [0] * (end - start)
        else:
            out.append(trained)
    return out


def _settle(data_source: Any, groups: list[Group], outcome: Outcome, reason: str | None = None) -> None:
    if isinstance(data_source, DataSource) and groups:
        data_source.settle(groups, outcome, reason)
