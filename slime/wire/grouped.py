"""Sends requests of one group that are submitted together as a single HTTP request.

Together means in the same turn of the event loop. The body holds a list for each field, and the engine sends
an event when a member finishes. This is invisible to callers: each request has its own response, id, deadline
and abort. If the shared request fails, or the engine accepts no lists, or a member is refused, the members
without a response are sent one by one, which reveals their own errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.liveness import waits
from slime.utils import http_utils
from slime.wire.protocol import MAX_INT32, GenerateRequest

logger = logging.getLogger(__name__)

MAX_MEMBERS = 64  # of one HTTP request
MAX_REFUSALS = 3  # shared requests refused in a row: then the engines are taken to accept no lists
_NO_PARTIAL_EVENTS = {"stream_interval": MAX_INT32}

_Key = tuple[Any, ...]


class GroupedRequests:
    """The shared requests of one client, which belongs to one event loop."""

    def __init__(self, base_url: str, timeout_s: float):
        self._base_url, self._timeout_s = base_url, timeout_s
        self._open: dict[_Key, _Batch] = {}  # batches that still accept members
        self._refusals = 0

    def accepts(self, request: GenerateRequest) -> bool:
        """Return whether a request may share. A plug-in that observes requests sees each one by itself."""
        return (
            request.group is not None
            and request.rid is not None
            and not request.image_data
            and self._refusals < MAX_REFUSALS
            and not http_utils.is_observed()
        )

    async def generate(self, request: GenerateRequest, headers: Mapping[str, str]) -> Any:
        """Return the engine's response, or None if the request must be sent alone."""
        key = (request.group, request.return_logprob, tuple(sorted(request.extra)))
        batch = self._open.get(key)
        if batch is None or len(batch.members) >= MAX_MEMBERS:
            batch = self._open[key] = _Batch(dict(headers))
            # The task runs after all requests of this turn have joined.
            batch.task = asyncio.ensure_future(self._send(key, batch))
        return await batch.response_to(request)

    async def _send(self, key: _Key, batch: _Batch) -> None:
        batch.is_sent = True
        if self._open.get(key) is batch:
            del self._open[key]
        try:
            if len(batch.members) > 1 and not batch.is_abandoned:
                url = f"{self._base_url}/generate"
                name = f"POST {url} ({len(batch.members)} requests of group {key[0]})"
                async with waits.limited(name, self._timeout_s, target=self._base_url):
                    async for event in http_utils.stream(url, group_json(batch.members), batch.headers):
                        batch.deliver(event)
                        self._refusals = 0
        except waits.WaitTimeout as error:
            batch.fail(error)
        except http_utils.HttpError as error:
            if 400 <= error.status < 500:
                self._refusals += 1
                if self._refusals == MAX_REFUSALS:
                    logger.info("The engines accept no grouped requests (%s); samples are sent alone.", error)
        finally:
            batch.release()


class _Batch:
    """Requests that are sent together, each with the future of its response."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers  # of the first member: its session decides which engine serves all
        self.members: list[GenerateRequest] = []
        self.task: asyncio.Task[None] | None = None
        self.is_sent = False
        self._futures: list[asyncio.Future[Any]] = []
        self._num_left = 0

    @property
    def is_abandoned(self) -> bool:
        """Return whether no member waits for a response any more."""
        return self._num_left == len(self.members)

    async def response_to(self, request: GenerateRequest) -> Any:
        """Join, and wait for the response. None: there is none, and the request must be sent alone."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.members.append(request)
        self._futures.append(future)
        try:
            return await future
        finally:
            future.cancel()
            self._num_left += 1
            if self.is_abandoned and self.is_sent and self.task is not None:
                self.task.cancel()  # the connection closes, which makes the engine end what is left

    def deliver(self, event: Any) -> None:
        place = _finished_member(event)
        if place is not None and place < len(self._futures) and not self._futures[place].done():
            self._futures[place].set_result(event)

    def fail(self, error: waits.WaitTimeout) -> None:
        """Raise the timeout in every member that waits: each has used up its own time, too."""
        for future in self._futures:
            if not future.done():
                future.set_exception(waits.WaitTimeout(str(error)))

    def release(self) -> None:
        """Let members without a response be sent alone."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)


def _finished_member(event: Any) -> int | None:
    """Return the index of the member whose whole response this is; None: it is no whole response."""
    meta = event.get("meta_info") if isinstance(event, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        return None
    place, count = event.get("index"), len(event.get("output_ids") or ())
    if type(place) is not int or place < 0 or meta["finish_reason"].get("status_code"):
        return None
    # A server may be configured to send only what is new in each event: that is no whole response.
    return place if meta.get("completion_tokens", count) == count else None


def group_json(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Return one body for all. The engine sends no event before a member is finished."""
    alone = [request.to_json() for request in requests]
    return {
        **alone[0],
        "input_ids": [one["input_ids"] for one in alone],
        "sampling_params": [{**one["sampling_params"], **_NO_PARTIAL_EVENTS} for one in alone],
        "rid": [one["rid"] for one in alone],
        "stream": True,
    }
