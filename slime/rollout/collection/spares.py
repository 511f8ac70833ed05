"""Spare samples: start more than a group needs, keep the first to finish, and abort the rest.

Episodes have long tails: one that hangs in a slow tool delays its group and the batch. The first to finish
are not a fair draw, though: a batch then holds fewer long episodes than the policy produces.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.prompt_groups import Entry, Group, copy_group, first_sample, index_of, is_finished
from slime.utils.types import Sample, flatten_samples

# A spare draws with seeds of its own, which come from the index of a sample.
_FIRST_SPARE_INDEX = 1 << 40


@dataclass(eq=False)
class _Started:
    place: int | None  # in the group; None: a spare
    task: asyncio.Task[Entry]
    scope: RequestScope


def is_fresh(group: Group) -> bool:
    """Return whether nothing of the group was started; a group that returns gets no spares again."""
    samples = flatten_samples(group)
    return all(s.status is Sample.Status.PENDING and not s.response_length for s in samples)


async def first_to_end(
    group: Group,
    num_spares: int,
    start: Callable[[Entry, bool], Coroutine[Any, Any, Entry]],
    end_requests: Callable[[RequestScope], Awaitable[None]],
) -> Group:
    """Return the group with the entries that finished first. `start` gets an entry, and if it is a spare.

    A spare replaces an entry that fails; when too few are left, the error is raised.
    """
    parent, started = current_scope() or RequestScope(), []
    for number, entry in enumerate([*group, *make_spares(group, num_spares)]):
        place, scope = number if number < len(group) else None, parent.child()
        with scope.entered():  # the task inherits it, so it can be aborted alone
            started.append(_Started(place, asyncio.ensure_future(start(entry, place is None)), scope))
    try:
        chosen = await _wait_for(started, len(group))
    except BaseException:
        await _end(started, end_requests)
        raise
    await _end([one for one in started if one not in chosen], end_requests)
    return _in_places(group, chosen)


def make_spares(group: Group, number: int) -> Group:
    spares: Group = []
    for spare in range(number):
        (entry,) = copy_group([group[spare % len(group)]])
        for sample in flatten_samples([entry]):
            sample.index = index_of(sample) + _FIRST_SPARE_INDEX * (1 + spare // len(group))
            sample.session_id = uuid4().hex
        spares.append(entry)
    return spares


async def _wait_for(started: list[_Started], wanted: int) -> list[_Started]:
    """Return the first to finish; after the end of the rollout also aborted ones, the longest first."""
    ended: list[_Started] = []
    cut: list[_Started] = []
    running = {one.task: one for one in started}
    error: BaseException | None = None
    while running and len(ended) < wanted:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for one in sorted((running.pop(task) for task in done), key=lambda one: started.index(one)):
            failure = one.task.exception()
            error = failure or error
            if failure is None:
                (ended if is_finished(one.task.result()) else cut).append(one)
    cut.sort(key=lambda one: -sum(s.response_length for s in flatten_samples([one.task.result()])))
    chosen = (ended + cut)[:wanted]
    if len(chosen) < wanted:
        assert error is not None, "every entry finished, was aborted or failed"
        raise error
    return chosen


async def _end(started: list[_Started], end_requests: Callable[[RequestScope], Awaitable[None]]) -> None:
    """Cancel tasks and abort their requests, whose ids are read first."""
    left = [one for one in started if not one.task.done()]
    ends = [asyncio.ensure_future(end_requests(one.scope)) for one in left]
    await asyncio.sleep(0)
    for one in left:
        one.task.cancel()
    await asyncio.gather(*(one.task for one in started), *ends, return_exceptions=True)


def _in_places(group: Group, chosen: list[_Started]) -> Group:
    """Return entries at their own places, and spares in the places of unfinished ones."""
    own = {one.place: one.task.result() for one in chosen if one.place is not None}
    spares = iter([one.task.result() for one in chosen if one.place is None])
    filled = []
    for place, entry in enumerate(group):
        made = own[place] if place in own else next(spares)
        source = first_sample([entry])
        for sample in flatten_samples([made]) if place not in own else ():
            sample.index = source.index
            if sample.rollout_id is not None:
                sample.rollout_id = source.rollout_id if source.rollout_id is not None else source.index
        filled.append(made)
    return filled
