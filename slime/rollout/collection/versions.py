"""How old a group is: the weight version of its oldest trained token, and what the engines hold now."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from slime.rollout.groups import Group
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample, flatten_samples, version_number
from slime.wire.control import EngineControl

ASK_DEADLINE_S = 5.0


def oldest_version(group: Group) -> int | None:
    """The smallest version among the tokens that will be trained; None when no token says."""
    numbers = [
        version_number(version)
        for sample in flatten_samples(group)
        for version, start, end in sample.version_spans
        if sample.loss_mask is None or any(sample.loss_mask[start:end])
    ]
    return min((number for number in numbers if number is not None), default=None)


def newest_version(group: Group) -> int | None:
    """The largest version among its tokens; None when no token says."""
    spans = [span for sample in flatten_samples(group) for span in sample.version_spans]
    numbers = [version_number(version) for version, _, _ in spans]
    return max((number for number in numbers if number is not None), default=None)


def name_versions(sample: Sample, answers: Iterable[str]) -> None:
    """Give trained tokens that name no version the oldest of those whose weights answered, if any did."""
    numbers = {number: version for version in answers if (number := version_number(version)) is not None}
    if not numbers:
        return
    version = numbers[min(numbers)]
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    unnamed = {i for i, trained in enumerate(mask) if trained}
    for _, start, end in sample.version_spans:
        unnamed.difference_update(range(start, end))
    # Tokens in a row have the same distance to their rank.
    for _, row in itertools.groupby(enumerate(sorted(unnamed)), lambda pair: pair[1] - pair[0]):
        places = [place for _, place in row]
        sample.version_spans.append((version, places[0], places[-1] + 1))
    sample.version_spans.sort(key=lambda span: span[1])


async def newest_version_held(urls: Sequence[str]) -> int | None:
    """The newest version that an engine answers with; None when none does (they are being started again)."""
    answers = await asyncio.gather(
        *(EngineControl(url, ASK_DEADLINE_S).version() for url in urls), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(
            answer, (HttpError, TimeoutError, KeyError, TypeError)
        ):
            raise answer
    numbers = [version_number(answer) for answer in answers if isinstance(answer, str)]
    return max((number for number in numbers if number is not None), default=None)
