"""The data plane: send a prompt to an engine (or the router before several), get typed tokens back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from slime.utils import http_utils, waits
from slime.utils.errors import EngineAnswerError
from slime.wire.dialects import ID_IS_TAKEN
from slime.wire.grouped import GroupedRequests
from slime.wire.protocol import GenerateRequest, Generation, SiblingRequests

logger = logging.getLogger(__name__)

_TAKEN_PAUSE_S = 0.5
SESSION_HEADER = "X-SMG-Routing-Key"  # read by the router's consistent-hashing policy
MAX_ABORTS = 64  # sent at a time: thousands of requests may end at once, and each would be a connection


class EngineClient:
    """Generates through one base url.

    A refused or broken connection and a 5xx are tried again (the engine is being restarted, and a generation
    has no side effect); a 4xx is the request's own fault and raises `HttpError` at once. `max_running` caps
    the requests in flight from this client: the rest wait here, where they cost neither a socket nor an
    engine's queue. Requests that name the same `group` travel together.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 1800.0, max_retries: int = 60, max_running: int = 1024
    ):
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._slots = asyncio.Semaphore(max_running)
        self._grouped = GroupedRequests(f"{self.base_url}/generate", timeout_s)

    async def generate(
        self, request: GenerateRequest, headers: Mapping[str, str] | None = None
    ) -> Generation:
        """One final answer. `request.stream` must be False and `request.sampling.n` 1."""
        if request.stream or request.sampling.n != 1:
            raise ValueError(
                "EngineClient.generate reads one final answer: use stream=False and sampling.n=1"
            )
        async with self._slots:
            answer = await waits.within(
                self._answer(request, headers or {}),
                name=f"POST {self.base_url}/generate (request {request.rid})",
                deadline_s=self.timeout_s,
                target=self.base_url,
            )
        try:
            return Generation.from_json(answer)
        except ValueError as error:
            raise EngineAnswerError(str(error)) from error

    async def generate_together(
        self, requests: SiblingRequests
    ) -> AsyncGenerator[list[tuple[int, Generation]], None]:
        """(place, answer) of each, those together that came together.

        A request that is not told of has to be sent by itself, whatever went wrong. Whoever calls this keeps
        to `max_running` itself.
        """
        first, count = requests.first, len(requests.rids)
        name = f"POST {self.base_url}/generate ({count} requests, the first: {first.rid})"
        waited = waits.waiting(name, deadline_s=self.timeout_s, target=self.base_url)
        headers = self._headers(first, None)
        with waited:
            async with contextlib.aclosing(self._grouped.answers(requests, headers)) as answers:
                async for events in answers:
                    read = [(place, _read(event)) for place, event in events]
                    yield [(place, answer) for place, answer in read if answer is not None]

    async def stream(
        self, request: GenerateRequest, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What was made so far of one answer, whenever there is more of it. A broken stream raises."""
        url, told = f"{self.base_url}/generate", self._headers(request, headers)
        events = http_utils.stream(url, request.to_json(), told, timeout_s=self.timeout_s, newest=True)
        async with self._slots, contextlib.aclosing(events):
            async for event in events:
                yield event

    def _headers(self, request: GenerateRequest, headers: Mapping[str, str] | None) -> dict[str, str]:
        session = {SESSION_HEADER: request.session} if request.session is not None else {}
        return {**session, **(headers or {})}

    async def _answer(self, request: GenerateRequest, headers: Mapping[str, str]) -> Any:
        answer, all_headers = None, self._headers(request, headers)
        if not headers and self._grouped.takes(request):
            answer = await self._grouped.answer(request, all_headers)
        if answer is None:
            url = f"{self.base_url}/generate"
            answer = await self._post_until_taken(url, request.to_json(), all_headers)
        return answer

    async def _post_until_taken(self, url: str, payload: dict[str, Any], headers: dict[str, str]) -> Any:
        """An engine that has not noticed that an earlier attempt's connection broke refuses its id as taken.

        That is no mistake of the request, and passes: the engine
        looks for such connections every few seconds.
        """
        while True:
            try:
                return await http_utils.post(url, payload, max_retries=self.max_retries, headers=headers)
            except http_utils.HttpError as error:
                if error.status != 400 or ID_IS_TAKEN not in error.body:
                    raise
            await asyncio.sleep(_TAKEN_PAUSE_S)

    async def cancel(self, engine_urls: Sequence[str], rids: Sequence[str]) -> None:
        """Abort requests by id at every worker; each then answers what it has made so far.

        It goes to the workers because the router has no control endpoints. Ids a worker does not hold are
        ignored; a worker that is gone has nothing left to abort.
        """
        slots = asyncio.Semaphore(MAX_ABORTS)
        calls = [(url, {"rid": rid}) for url in engine_urls for rid in rids]
        await asyncio.gather(*(_abort(url, which, slots) for url, which in calls))

    async def cancel_scope(self, engine_urls: Sequence[str], scope: str) -> None:
        """`cancel` of all requests whose ids begin with this, by one call to each worker.

        Only for workers whose dialect has `aborts_by_prefix`: others take it for the id of one request.
        """
        slots = asyncio.Semaphore(MAX_ABORTS)
        which = {"rid": scope, "prefix": True}
        await asyncio.gather(*(_abort(url, which, slots) for url in engine_urls))


def _read(event: Any) -> Generation | None:
    try:
        return Generation.from_json(event)
    except ValueError as error:
        logger.warning("an answer that cannot be read is asked for again: %s", error)
        return None


async def _abort(url: str, which: dict[str, Any], slots: asyncio.Semaphore) -> None:
    try:
        async with slots:
            await http_utils.post(f"{url.rstrip('/')}/abort_request", which, max_retries=0, timeout_s=30.0)
    except http_utils.HttpError as error:
        if error.status != 0:
            raise
