"""Supervised fine-tuning as a rollout: conversations become samples, nothing is generated."""

from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.collection.conversations import fill_batch, write_tokens
from slime.rollout.prompt_groups import Group, first_sample
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """A batch of masked conversations; one without a trained token is left out and replaced."""
    if evaluation:
        raise ValueError("sft_rollout cannot evaluate: set --eval-function-path.")
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"--n-samples-per-prompt is {args.n_samples_per_prompt}: supervised data needs 1.")
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)

    def masked(group: Group) -> Group | str:
        sample = first_sample(group)
        reason = write_tokens(args, sample, sample.prompt, masks)
        if reason is not None:
            return reason
        sample.reward = 0
        return group

    return fill_batch(args, rollout_id, data_source, masked, what="conversations", metric="sft")
