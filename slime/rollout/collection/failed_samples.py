"""Keeps a group of which some samples failed: stand-ins fill their places, so the batch keeps its size."""

import asyncio
import logging
from collections.abc import Sequence

from slime.rollout.collection.collector import GroupFailed, is_permanent
from slime.rollout.prompt_groups import Entry, Group, copy_sample, describe, first_sample, index_of
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)


async def keep_the_rest(group: Group, tasks: Sequence[asyncio.Task[Entry]]) -> Group:
    """Wait for all entries and replace failed ones by stand-ins; raise only when all failed.

    Any other error (and a cancellation) stops all of them, as it would without this.
    """
    try:
        done = await asyncio.gather(*(_made_or_failed(task) for task in tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    made = [entry for entry in done if not isinstance(entry, Exception)]
    if not made:
        raise next(entry for entry in done if isinstance(entry, Exception))
    model = min(flatten_samples(made), key=lambda sample: len(sample.tokens))
    return [_stand_in(group[i], model, e) if isinstance(e, Exception) else e for i, e in enumerate(done)]


async def _made_or_failed(task: asyncio.Task[Entry]) -> Entry | Exception:
    try:
        return await task
    except Exception as error:
        if isinstance(error, GroupFailed) or is_permanent(error):
            return error
        raise


def _stand_in(entry: Entry, model: Sample, error: Exception) -> Sample:
    """Return a copy of a sibling that trains nothing and stays outside the others' baseline."""
    failed = first_sample([entry])
    logger.warning("%s is left out of its group: %s", describe(failed), error)
    new = copy_sample(model)
    new.index = new.rollout_id = failed.index
    new.group_index = -1 - index_of(failed)
    new.loss_mask = [0] * new.response_length
    new.remove_sample = True
    new.status = Sample.Status.FAILED
    new.metadata["failure"] = f"{type(error).__name__}: {error}"
    return new


def share_rewards(group: Group) -> None:
    """Give stand-ins the reward of their sibling once it is scored: a batch needs one per sample."""
    samples = flatten_samples(group)
    for sample in samples:
        if sample.status is Sample.Status.FAILED and sample.reward is None:
            sample.reward = next((s.reward for s in samples if s.reward is not None), None)
