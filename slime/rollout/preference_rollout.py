"""Preference pairs as a rollout: each row becomes a preferred and a rejected answer, nothing is generated.

A row holds two conversations with a common beginning: `--input-key chosen --label-key rejected`, each a list
of messages. The common part is the prompt; the assistant's tokens after it are compared. With
`--metadata-columns prompt` both may be the completion alone, as text or messages. A row's metadata may hold a
"margin".
"""

from collections.abc import Callable
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.collection.conversations import Messages, conversation_of, fill_batch, write_tokens
from slime.rollout.prompt_groups import Group, copy_sample, describe, first_sample
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` pairs. One that cannot be compared is left out with its reason and replaced."""
    if evaluation:
        raise ValueError("preference_rollout cannot evaluate: set --eval-function-path.")
    return fill_batch(args, rollout_id, data_source, group_maker(args), what="pairs", metric="pairs")


def group_maker(args: PluginArgs) -> Callable[[Group], Group | str]:
    """Return a function that makes a pair of a row, or returns why it cannot be compared."""
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)

    def paired(group: Group) -> Group | str:
        pair = make_pair(args, first_sample(group), masks)
        return pair if isinstance(pair, str) else [pair]

    return paired


def make_pair(args: PluginArgs, sample: Sample, masks: MultiTurnLossMaskGenerator) -> list[Sample] | str:
    """[preferred, rejected] with one rollout id, or the reason why the row cannot be compared."""
    chosen = _conversation(sample, sample.prompt, "--input-key")
    rejected = _conversation(sample, sample.label, "--label-key")
    if chosen == rejected:
        return "same_answer"
    alike = [one == other for one, other in zip(chosen, rejected, strict=False)]
    shared = [*alike, False].index(False)  # messages that both begin with
    pair = []
    for reward, messages in ((1.0, chosen), (0.0, rejected)):
        answer = _answer(args, sample, messages, shared, masks)
        if isinstance(answer, str):
            return answer
        answer.reward = reward
        pair.append(answer)
    return "same_answer" if pair[0].tokens == pair[1].tokens else pair


def _conversation(sample: Sample, messages: Any, flag: str) -> Messages:
    prompt = sample.metadata.get("prompt")
    alone = isinstance(messages, str) or (
        isinstance(messages, list) and [m.get("role") for m in messages[:1]] == ["assistant"]
    )
    if prompt is not None and alone:
        return conversation_of(prompt, messages)
    if not isinstance(messages, list):
        found = f"{flag} must name a list of messages, found {type(messages).__name__}"
        raise ValueError(f"{describe(sample)}: {found}; --input-key chosen --label-key rejected.")
    return messages


def _answer(
    args: PluginArgs, sample: Sample, messages: Messages, shared: int, masks: MultiTurnLossMaskGenerator
) -> Sample | str:
    # A turn that both have is part of the prompt, whoever wrote it.
    marked = [{**m, "step_loss_mask": 0} if i < shared else m for i, m in enumerate(messages)]
    answer = copy_sample(sample)
    reason = write_tokens(args, answer, marked, masks)
    if reason is not None:
        return reason
    answer.prompt, answer.label = messages[:shared], None
    answer.response = "\n".join(str(m["content"]) for m in messages[shared:])  # for readers of the record
    answer.rollout_id = sample.index
    answer.train_metadata = {"margin": float(sample.metadata.get("margin", 0.0))}
    return answer
