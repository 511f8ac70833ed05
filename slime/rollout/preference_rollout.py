"""Preference pairs as a rollout: each row becomes a preferred and a rejected answer, nothing is generated.

A row holds two conversations that begin alike: `--input-key chosen --label-key rejected`, each a list of
messages. What both share is the prompt; the assistant's tokens after it are compared. A row's metadata may
hold a "margin".
"""

import logging
from collections import Counter
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.groups import Group, copy_sample, describe
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` pairs. One that cannot be compared is left out with its reason and replaced."""
    if evaluation:
        raise ValueError(
            "preference_rollout cannot evaluate: set --eval-function-path, or drop the evaluation flags."
        )
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)
    pairs: list[Group] = []
    skipped: Counter[str] = Counter()
    while len(pairs) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size - len(pairs)):
            pair = make_pair(args, group[0], masks)
            if isinstance(pair, list):
                pairs.append([pair])
                continue
            skipped[pair] += 1
            _settle(data_source, [group], "filtered", pair)
            if not pairs and 0 < len(data_source) <= skipped.total():
                raise ValueError(
                    f"--prompt-data: none of {len(data_source)} pairs can be trained on: {dict(skipped)}."
                )
    if skipped:
        logger.warning("rollout %d: pairs left out: %s", rollout_id, dict(skipped))
    _settle(data_source, pairs, "trained")
    metrics = {f"rollout/pairs/skipped_{reason}": count for reason, count in skipped.items()}
    return RolloutFnTrainOutput(samples=pairs, metrics=metrics or None)


def make_pair(args: PluginArgs, sample: Sample, masks: MultiTurnLossMaskGenerator) -> list[Sample] | str:
    """[preferred, rejected] with one rollout id, or the reason why the row cannot be compared."""
    conversations = (sample.prompt, sample.label)
    for messages, flag in zip(conversations, ("--input-key", "--label-key"), strict=True):
        if not isinstance(messages, list):
            raise ValueError(
                f"{describe(sample)}: {flag} must name a list of messages, found {type(messages).__name__}; "
                "a pair is read with --input-key chosen --label-key rejected."
            )
    shared = _shared_turns(*conversations)
    pair = []
    for reward, messages in zip((1.0, 0.0), conversations, strict=True):
        answer = _answer(args, sample, messages, shared, masks)
        if isinstance(answer, str):
            return answer
        answer.reward = reward
        pair.append(answer)
    return "same_answer" if pair[0].tokens == pair[1].tokens else pair


def _shared_turns(chosen: Messages, rejected: Messages) -> int:
    """How many messages both conversations begin with."""
    count = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        count += 1
    return count


def _answer(
    args: PluginArgs, sample: Sample, messages: Messages, shared: int, masks: MultiTurnLossMaskGenerator
) -> Sample | str:
    # A turn that both have is part of the prompt, whoever wrote it.
    marked = [{**m, "step_loss_mask": 0} if i < shared else m for i, m in enumerate(messages)]
    try:
        token_ids, loss_mask = masks.get_loss_mask(marked, tools=sample.metadata.get("tools"))
    except ValueError as error:
        raise ValueError(f"{describe(sample)}: {error}") from error
    response_length = masks.get_response_lengths([loss_mask])[0]
    if response_length == 0:
        return "no_assistant_token"
    if args.max_context_len is not None and len(token_ids) > args.max_context_len:
        return "longer_than_context"
    answer = copy_sample(sample)
    answer.prompt = messages
    answer.label = None
    answer.tokens = token_ids
    answer.response_length = response_length
    answer.loss_mask = loss_mask[len(loss_mask) - response_length :]
    answer.rollout_id = sample.index
    answer.train_metadata = {"margin": float(sample.metadata.get("margin", 0.0))}
    answer.status = Sample.Status.COMPLETED
    return answer


def _settle(data_source: Any, groups: list[Group], outcome: str, reason: str | None = None) -> None:
    if isinstance(data_source, DataSource) and groups:
        data_source.settle(groups, outcome, reason)
