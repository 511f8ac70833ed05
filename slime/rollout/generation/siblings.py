"""Fresh samples of one prompt as one piece of work: one request, one task that reads its answers.

It gives what the generate function gives for each of them, at a fraction of its cost; `generate` stays the
definition of what that is. Whatever is unusual from the start (`go_together`) is left to it, and so is every
sample that comes back without a whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from slime.arguments import PluginArgs
from slime.observability.trace_utils import trace_stretch
from slime.rollout.generation.concurrency import Limit
from slime.rollout.generation.generate_request import (
    check_answer,
    prepare_prompt,
    sibling_requests,
    token_budget,
)
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.sample_images import pictures_of
from slime.rollout.generation.scope import RequestScope
from slime.rollout.prompt_groups import Entry, Group, describe, without_response
from slime.utils import http_utils
from slime.utils.types import Sample
from slime.wire.client import EngineClient
from slime.wire.protocol import Generation, SiblingRequests

logger = logging.getLogger(__name__)

# Groups that the cap on requests has room for: a group enters as a whole, and what is left over stays empty.
_GROUPS_AT_LEAST = 4

Work = Callable[[Sample], Coroutine[Any, Any, Entry]]
WorkOfMany = Callable[[list[Sample]], Coroutine[Any, Any, list[Entry]]]


def go_together(
    group: Group, args: PluginArgs, sampling_params: Mapping[str, Any], limit: Limit
) -> TypeGuard[list[Sample]]:
    """Whether nothing of the run looks at these samples one by one before they have their answers."""
    return (
        1 < len(group) <= limit.limit // _GROUPS_AT_LEAST
        and type(limit) is Limit  # one that moves may become too small for a group
        and args.custom_generate_function_path is None
        and not args.rollout_sample_hook_path
        and not args.router_middleware_paths
        and args.max_tokens_in_flight is None
        and args.group_failure_action != "keep"
        and sampling_params.get("sampling_seed") is None
        and not http_utils.is_observed()
        and all(_is_fresh_copy_of(group[0], entry) for entry in group)
    )


def _is_fresh_copy_of(first: Entry, entry: Entry) -> bool:
    """Whether it begins with its prompt, which is that of the first."""
    return (
        isinstance(entry, Sample)
        and isinstance(first, Sample)
        and entry.status is Sample.Status.PENDING
        and not entry.response_length
        and entry.generate_function_path is None
        and isinstance(entry.prompt, str)
        and not (entry.multimodal_inputs and pictures_of(entry))
        and entry.prompt == first.prompt
        and entry.tokens == first.tokens
    )


@dataclass(frozen=True, slots=True)
class Ways:
    """To the engines: who asks them, under which cap and scope, and the name of the one that answered."""

    client: EngineClient
    limit: Limit
    scope: RequestScope
    engine_of: Callable[[Generation], dict[str, str]]


async def generate_siblings(
    args: PluginArgs,
    samples: list[Sample],
    sampling_params: dict[str, Any],
    tokenizer: Any,
    ways: Ways,
    finish: WorkOfMany,
    alone: Work,
) -> Group:
    """All of them. `finish`: what comes after an answer; `alone`: the way of a sample that got none."""
    prepare_prompt(samples[0], tokenizer)
    for sample in samples[1:]:
        sample.tokens = samples[0].tokens.copy()
    budget = token_budget(args, samples[0], sampling_params.get("max_new_tokens"), ways.scope.max_context_len)
    made: dict[int, Entry] = {}

    async def follow(places: list[int]) -> None:
        made.update(zip(places, await finish([samples[place] for place in places]), strict=True))

    async def go_alone(place: int) -> None:
        made[place] = await alone(samples[place])

    try:
        async with asyncio.TaskGroup() as tasks:
            missing, last = set(range(len(samples))), list[int]()
            if budget != 0:
                requests = sibling_requests(args, samples, sampling_params, budget)
                told = _answers(args, samples, requests, ways)
                async with contextlib.aclosing(told) as answers:
                    async for whole, cut_short in answers:
                        missing.difference_update(whole, cut_short)
                        for place in cut_short:
                            tasks.create_task(go_alone(place))
                        if missing and whole:
                            tasks.create_task(follow(whole))
                        elif whole:
                            last = whole  # no task is needed to go on with these: nothing else is read
            for place in sorted(missing):
                tasks.create_task(go_alone(place))
            if last:
                await follow(last)
    except BaseExceptionGroup as several:
        first = several.exceptions[0]  # its failure ended the others
        raise first from first.__cause__
    return [made[place] for place in range(len(samples))]


async def _answers(
    args: PluginArgs,
    samples: list[Sample],
    requests: SiblingRequests,
    ways: Ways,
) -> AsyncGenerator[tuple[list[int], list[int]], None]:
    """Places of samples that have their answer, and of those that go on alone from what they have now, as
    answers come; a sample that is not told of got none.
    """
    limit, scope = ways.limit, ways.scope
    await limit.enter(len(samples))
    waiting, began = set(range(len(samples))), None
    try:
        if scope.aborted:
            for sample in samples:
                sample.status = Sample.Status.ABORTED
            yield list(range(len(samples))), []
            return
        began, started = scope.begin(requests.rids), time.time()
        async with contextlib.aclosing(ways.client.generate_together(requests)) as answers:
            async for came in answers:
                fresh = {place: answer for place, answer in came if place in waiting}
                waiting.difference_update(fresh)
                limit.leave(len(fresh))
                scope.end_all([requests.rids[place] for place in fresh], began)
                scope.note_tokens(sum(len(one.ids) for one in fresh.values()) if is_trained() else 0)
                # Of one stream, so of one engine.
                engine = ways.engine_of(next(iter(fresh.values()))) if fresh else {}
                whole: list[int] = []
                cut_short: list[int] = []
                for place, answer in fresh.items():
                    sample = samples[place]
                    trace_stretch(sample, "generate", started, {"tokens": len(answer.ids), **engine})
                    is_whole = _take(args, requests, place, samples, answer, scope)
                    (whole if is_whole else cut_short).append(place)
                yield whole, cut_short
    finally:
        limit.leave(len(waiting))
        if began is not None:
            scope.end_all([requests.rids[place] for place in waiting], began)


def _take(
    args: PluginArgs,
    requests: SiblingRequests,
    place: int,
    samples: list[Sample],
    answer: Generation,
    scope: RequestScope,
) -> bool:
    """Write an answer into its sample; False: it goes on alone, from what it has then."""
    sample = samples[place]
    try:
        check_answer(args, requests.first, answer, requests.rids[place])
        sample.append_answer(args, answer.ids, answer.log_probs or (), answer.meta, answer.text)
    except Exception as error:  # whatever is wrong with it: if it stays so, the sample alone fails over it
        logger.warning("%s is asked for again: %s: %s", describe(sample), type(error).__name__, error)
        samples[place] = without_response(sample)  # half of the answer may be in it
        return False
    return answer.finish != "abort" or scope.aborted
