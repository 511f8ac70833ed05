"""Sends prompts to an engine (or to the balancer in front of several) and returns typed tokens."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from slime.liveness import waits
from slime.utils import http_utils
from slime.utils.errors import EngineResponseError
from slime.wire.grouped import GroupedRequests
from slime.wire.protocol import GenerateRequest, Generation

SESSION_HEADER = "X-SMG-Routing-Key"  # read by the router's consistent-hashing policy
MAX_ABORTS = 64  # sent at a time: thousands of requests may end at once, and each would be a connection


class EngineClient:
    """Generates through one base url.

    A refused or broken connection and a 5xx are retried (the engine is being restarted, and a generation has
    no side effect); a 4xx means that the request is invalid and raises `HttpError` at once. `max_running`
    caps the requests in flight from this client: the rest wait here, where they need neither a socket nor
    room in an engine's queue. Requests with the same `group` that are submitted together are sent as one HTTP
    request.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 1800.0, max_retries: int = 60, max_running: int = 1024
    ):
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._url = f"{self.base_url}/generate"
        self._slots = asyncio.Semaphore(max_running)
        self._grouped = GroupedRequests(self.base_url, timeout_s)

    async def generate(
        self, request: GenerateRequest, headers: Mapping[str, str] | None = None
    ) -> Generation:
        """Return one final response. `request.stream` must be False and `request.sampling.n` 1."""
        if request.stream or request.sampling.n != 1:
            raise ValueError(
                "EngineClient.generate reads one final answer: use stream=False and sampling.n=1"
            )
        all_headers = self._headers(request, headers)
        async with self._slots:
            answer = None
            if not headers and self._grouped.accepts(request):
                answer = await self._grouped.generate(request, all_headers)
            if answer is None:
                name = f"POST {self._url} (request {request.rid})"
                async with waits.limited(name, self.timeout_s, target=self.base_url):
                    answer = await http_utils.post(
                        self._url, request.to_json(), self.max_retries, all_headers, retry_if=_id_is_taken
                    )
        try:
            return Generation.from_json(answer)
        except ValueError as error:
            raise EngineResponseError(str(error)) from error

    def _headers(self, request: GenerateRequest, headers: Mapping[str, str] | None) -> dict[str, str]:
        session = {SESSION_HEADER: request.session} if request.session is not None else {}
        return {**session, **(headers or {})}

    async def cancel(self, engine_urls: Sequence[str], rids: Sequence[str]) -> None:
        """Abort requests by id at every worker; each then returns what it has generated so far.

        Workers are called directly because the router has no control endpoints. A worker ignores ids that it
        does not hold; a worker that is gone has nothing left to abort.
        """
        await _abort([(url, {"rid": rid}) for url in engine_urls for rid in rids])

    async def cancel_scope(self, engine_urls: Sequence[str], scope: str) -> None:
        """Abort all requests whose ids start with `scope`, by one call to each worker.

        Only for workers whose dialect has `aborts_by_prefix`: others read it as the id of one request.
        """
        await _abort([(url, {"rid": scope, "prefix": True}) for url in engine_urls])


def _id_is_taken(error: http_utils.HttpError) -> bool:
    """Return whether SGLang refuses an id because it has not noticed yet that the last connection broke."""
    return error.status == 400 and "Duplicate request ID" in error.body


async def _abort(calls: list[tuple[str, dict[str, Any]]]) -> None:
    slots = asyncio.Semaphore(MAX_ABORTS)

    async def abort(url: str, which: dict[str, Any]) -> None:
        try:
            async with slots:
                await http_utils.post(
                    f"{url.rstrip('/')}/abort_request", which, max_retries=0, timeout_s=30.0
                )
        except http_utils.HttpError as error:
            if error.status != 0:
                raise

    await asyncio.gather(*(abort(url, which) for url, which in calls))
