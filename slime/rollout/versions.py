"""How old a group is: the weight version of its oldest trained token, and the version the engines hold now."""

import asyncio
from collections.abc import Sequence

from slime.rollout.groups import Group
from slime.utils.http_utils import HttpError
from slime.utils.types import flatten_samples, version_number
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
