"""The age of a group in weight versions, and the versions that engines and trainer hold."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime.arguments import PluginArgs
from slime.rollout.prompt_groups import Group
from slime.utils.packed_samples import values_of
from slime.utils.types import Sample, flatten_samples, version_number
from slime.wire.control import EngineControl

ASK_DEADLINE_S = 5.0


def oldest_version(group: Group) -> int | None:
    """Return the smallest version of the tokens that will be trained; None if no token has one."""
    numbers = [
        version_number(version)
        for sample in flatten_samples(group)
        for version, start, end in sample.version_spans
        if (mask := values_of(sample, "loss_mask")) is None or np.any(mask[start:end])
    ]
    return min((number for number in numbers if number is not None), default=None)


def newest_version(group: Group) -> int | None:
    """Return the largest version of its tokens; None if no token has one."""
    numbers = [version_number(span[0]) for sample in flatten_samples(group) for span in sample.version_spans]
    return max((number for number in numbers if number is not None), default=None)


def name_versions(sample: Sample, answers: Iterable[str]) -> None:
    """Give trained tokens without a version the oldest version that responded, if any did."""
    numbers = {number: version for version in answers if (number := version_number(version)) is not None}
    if not numbers:
        return
    version = numbers[min(numbers)]
    unnamed = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    for _, start, end in sample.version_spans:
        unnamed[start:end] = [0] * (end - start)
    place = 0
    for trained, row in itertools.groupby(unnamed, bool):
        start, place = place, place + len(list(row))
        if trained:
            sample.version_spans.append((version, start, place))
    sample.version_spans.sort(key=lambda span: span[1])


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Predicts how many versions the trainer will be ahead of the engines, by when weights are pushed.

    The synchronous loop pushes after each step. The overlapped loop generates a rollout while it trains on
    the previous one, and pushes when generation is done, so that the next rollout is one version old.

    Example: PushPlan(overlapped=True, interval=1, start=0).until(3, 3) is 1.
    """

    overlapped: bool
    interval: int  # rollouts between two pushes of the overlapped loop
    start: int  # the first rollout, which is made and trained by the same weights

    def until(self, making: int, trained: int) -> int:
        """Pushes from the weights that engines hold while they make one rollout to those another trains."""
        return trained // self._interval - self._held(making)

    def last_within(self, making: int, bound: int) -> int:
        """The last rollout that may train tokens which are made now, while `making` is."""
        return (self._held(making) + bound + 1) * self._interval - 1

    def _held(self, making: int) -> int:
        return max(making - 1, self.start) // self._interval if self.overlapped else making

    @property
    def _interval(self) -> int:
        return self.interval if self.overlapped else 1


def push_plan(args: PluginArgs) -> PushPlan:
    return PushPlan(args.overlapped_loop, args.update_weights_interval, args.start_rollout_id)


async def newest_version_held(urls: Sequence[str]) -> int | None:
    """Return the newest version that an engine reports; None if none responds (they are restarting)."""
    held = await asyncio.gather(*(EngineControl(url, ASK_DEADLINE_S).loaded_version() for url in urls))
    return max((number for version in held if (number := version_number(version)) is not None), default=None)
