"""Requests of one group that begin together travel as one: a list in, an event back as each of them finishes.

What asks sees nothing of it: each request has its own answer, id, deadline and abort. Whatever goes wrong
with the one (an engine that takes no lists, a stream that breaks, a member that is refused) leaves members
without an answer, and each of them is then sent alone, where its error is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from slime.utils import http_utils
from slime.wire.protocol import MAX_INT32, GenerateRequest, SiblingRequests

logger = logging.getLogger(__name__)

MAX_MEMBERS = 64  # of one request
# Refused one after another, with no list taken between them: these engines know no lists.
MAX_REFUSALS = 3
_SILENT = {"stream_interval": MAX_INT32}


class GroupedRequests:
    """The groups of one client. Use it on one event loop."""

    def __init__(self, url: str, timeout_s: float):
        self._url, self._timeout_s = url, timeout_s
        self._gathering: dict[tuple[Any, ...], _Batch] = {}
        self._refusals = 0

    def takes(self, request: GenerateRequest) -> bool:
        """Whether a request may travel with others. One that a plug-in watches goes as it always did."""
        return (
            request.group is not None
            and request.rid is not None
            and not request.image_data
            and self._refusals < MAX_REFUSALS
            and not http_utils.is_observed()
        )

    async def answers(
        self, requests: SiblingRequests, headers: Mapping[str, str]
    ) -> AsyncGenerator[list[tuple[int, Any]], None]:
        """(place, answer) of each as they are finished, those together that came together; those that are
        missing at the end have to be sent alone. At most MAX_MEMBERS of them.
        """
        if not self.takes(requests.first):
            return
        payload = siblings_json(requests)
        told = http_utils.stream_together(self._url, payload, dict(headers), timeout_s=self._timeout_s)
        try:
            async with contextlib.aclosing(told) as read:
                async for events in read:
                    places = map(_finished_member, events)
                    found = [
                        (place, event)
                        for place, event in zip(places, events, strict=True)
                        if place is not None and place < len(requests.rids)
                    ]
                    if found:
                        self._refusals = 0
                        yield found
        except http_utils.HttpError as error:
            self._note_refusal(error)

    async def answer(self, request: GenerateRequest, headers: Mapping[str, str]) -> Any:
        """The engine's answer; None: the request has to be sent alone."""
        batch = self._join(request, headers)
        place = len(batch.members)
        batch.members.append(request)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        batch.futures.append(future)
        try:
            return await future
        finally:
            batch.leave(place)

    def _join(self, request: GenerateRequest, headers: Mapping[str, str]) -> _Batch:
        """The batch of the group that is being gathered: in this turn of the loop, before any is sent."""
        key = (request.group, request.return_logprob, tuple(sorted(request.extra)))
        batch = self._gathering.get(key)
        if batch is None or len(batch.members) >= MAX_MEMBERS:
            batch = self._gathering[key] = _Batch(dict(headers))
            asyncio.get_running_loop().call_soon(self._send, key, batch)
        return batch

    def _send(self, key: tuple[Any, ...], batch: _Batch) -> None:
        if self._gathering.get(key) is batch:
            del self._gathering[key]
        if batch.is_left:
            return
        if len(batch.members) == 1:
            batch.give_up()
        else:
            batch.task = asyncio.ensure_future(self._read(batch))

    async def _read(self, batch: _Batch) -> None:
        try:
            payload = group_json(batch.members)
            events = http_utils.stream(self._url, payload, batch.headers, timeout_s=self._timeout_s)
            async for event in events:
                batch.settle(event)
                self._refusals = 0
        except http_utils.HttpError as error:
            self._note_refusal(error)
        finally:
            batch.give_up()

    def _note_refusal(self, error: http_utils.HttpError) -> None:
        if 400 <= error.status < 500:
            self._refusals += 1
            if self._refusals == MAX_REFUSALS:
                logger.info("samples are asked for one by one: the engines take no groups (%s)", error)


class _Batch:
    """Members, each with the future of its answer; `task` reads the stream once it is sent."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers  # of the first: its session decides which engine all of them go to
        self.members: list[GenerateRequest] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.task: asyncio.Task[None] | None = None
        self._num_left = 0

    @property
    def is_left(self) -> bool:
        """Nobody waits for an answer any more."""
        return self._num_left == len(self.members)

    def settle(self, event: Any) -> None:
        place = _finished_member(event)
        if place is not None and place < len(self.futures) and not self.futures[place].done():
            self.futures[place].set_result(event)

    def give_up(self) -> None:
        """Those without an answer are sent alone."""
        for future in self.futures:
            if not future.done():
                future.set_result(None)

    def leave(self, place: int) -> None:
        """Its asker has gone on. When nobody is left the connection closes, by which engines end the rest."""
        self.futures[place].cancel()
        self._num_left += 1
        if self.is_left and self.task is not None:
            self.task.cancel()


def _finished_member(event: Any) -> int | None:
    """The place of the request whose whole answer this is; None: it is none."""
    meta = event.get("meta_info") if isinstance(event, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        return None
    place, count = event.get("index"), len(event.get("output_ids") or ())
    if type(place) is not int or place < 0 or meta["finish_reason"].get("status_code"):
        return None
    # A server may be set to send what is new in each event only: that is no whole answer.
    return place if meta.get("completion_tokens", count) == count else None


def siblings_json(requests: SiblingRequests) -> dict[str, Any]:
    """`group_json` of requests that differ in seed and id alone: what they share is spelled once."""
    first, count = requests.first.to_json(), len(requests.rids)
    ids, sampling = first["input_ids"], {**first["sampling_params"], **_SILENT}
    sampling.pop("sampling_seed", None)
    begun = json.dumps(sampling)[:-1]
    return {
        **first,
        "input_ids": http_utils.Spelled([ids] * count, ", ".join([json.dumps(ids)] * count)),
        "sampling_params": http_utils.Spelled(
            [{**sampling, "sampling_seed": seed} for seed in requests.seeds],
            ", ".join([f'{begun}, "sampling_seed": {json.dumps(seed)}}}' for seed in requests.seeds]),
        ),
        "rid": list(requests.rids),
        "stream": True,
    }


def group_json(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """One body for all. No event is asked for before a member is finished."""
    alone = [request.to_json() for request in requests]
    return {
        **alone[0],
        "input_ids": [one["input_ids"] for one in alone],
        "sampling_params": [{**one["sampling_params"], **_SILENT} for one in alone],
        "rid": [one["rid"] for one in alone],
        "stream": True,
    }
