"""Supervised fine-tuning as a rollout: conversations from the data
source become samples, nothing is generated.
"""

import logging
from collections import Counter
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.groups import Group, describe
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """A batch of masked conversations. One without a trained token
    is left out with its reason and replaced.
    """
    if evaluation:
        raise ValueError(
            "sft_rollout cannot evaluate: set --eval-function-path, or drop the evaluation flags."
        )
    if args.n_samples_per_prompt != 1:
        raise ValueError(
            f"--n-samples-per-prompt is {args.n_samples_per_prompt}: supervised data has one answer, use 1."
        )
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)
    groups: list[Group] = []
    skipped: Counter[str] = Counter()
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size - len(groups)):
            reason = _prepare(args, group[0], masks)
            if reason is None:
                groups.append(group)
                continue
            skipped[reason] += 1
            _settle(data_source, [group], "filtered", reason)
            _check_progress(skipped, len(groups), data_source)
    if skipped:
        logger.warning("rollout %d: conversations left out: %s", rollout_id, dict(skipped))
    _settle(data_source, groups, "trained")
    metrics = {f"rollout/sft/skipped_{reason}": count for reason, count in skipped.items()}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics or None)


def _prepare(args: PluginArgs, sample: Sample, masks: MultiTurnLossMaskGenerator) -> str | None:
    """Fill tokens and mask; the reason when the sample cannot be trained on."""
    try:
        token_ids, loss_mask = masks.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
    except ValueError as error:
        raise ValueError(f"{describe(sample)}: {error}") from error
    response_length = masks.get_response_lengths([loss_mask])[0]
    if response_length == 0:
        return "no_assistant_token"
    if args.max_context_len is not None and len(token_ids) > args.max_context_len:
        return "longer_than_context"
    sample.tokens = token_ids
    sample.response_length = response_length
    sample.loss_mask = loss_mask[len(loss_mask) - response_length :]
    sample.reward = 0
    sample.status = Sample.Status.COMPLETED
    return None


def _check_progress(skipped: Counter[str], num_kept: int, data_source: Any) -> None:
    """A whole epoch without one usable conversation will not get better in the next."""
    if num_kept == 0 and 0 < len(data_source) <= skipped.total():
        raise ValueError(
            f"--prompt-data: none of {len(data_source)} conversations can be trained on: {dict(skipped)}."
        )


def _settle(data_source: Any, groups: list[Group], outcome: str, reason: str | None = None) -> None:
    if isinstance(data_source, DataSource) and groups:
        data_source.settle(groups, outcome, reason)
