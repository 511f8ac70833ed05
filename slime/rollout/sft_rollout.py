"""Supervised fine-tuning as a rollout: written conversations become samples, nothing is generated.

A row holds a conversation (`--input-key messages`), or a prompt and its completion (`--input-key prompt
--label-key completion`), each of them text or messages. With `--loss-mask-type text` a row may be plain text.
"""

from collections.abc import Callable
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.collection.conversations import Messages, conversation_of, fill_batch, write_tokens
from slime.rollout.prompt_groups import Group, describe, first_sample
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """A batch of masked conversations; one without a trained token is left out and replaced."""
    if evaluation:
        raise ValueError("sft_rollout cannot evaluate: set --eval-function-path.")
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"--n-samples-per-prompt is {args.n_samples_per_prompt}: supervised data needs 1.")
    return fill_batch(args, rollout_id, data_source, group_maker(args), what="conversations", metric="sft")


def group_maker(args: PluginArgs) -> Callable[[Group], Group | str]:
    """Return a function that writes the tokens of a row, or returns why it cannot be trained on."""
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)

    def masked(group: Group) -> Group | str:
        sample = first_sample(group)
        reason = write_tokens(args, sample, _conversation(args, sample), masks)
        return group if reason is None else reason

    return masked


def _conversation(args: PluginArgs, sample: Sample) -> Messages:
    """Return the messages of a row; `write_tokens` refuses whatever is none."""
    is_whole = isinstance(sample.prompt, list) and sample.prompt[-1].get("role") == "assistant"
    if sample.label and not is_whole:
        if isinstance(sample.label, str):
            sample.response = sample.label  # for those who read the record
        try:
            return conversation_of(sample.prompt, sample.label)
        except ValueError as error:
            raise ValueError(f"{describe(sample)}: {error}") from None
    prompt: Any = sample.prompt
    if args.loss_mask_type == "text" and isinstance(prompt, str):
        return [{"role": "assistant", "content": prompt}]
    return prompt
