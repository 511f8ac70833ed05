"""FakeEngine: a scripted HTTP server that answers /generate like an engine does. It computes nothing.

Tokens are a function of the request's prompt and seed. It can delay, hold requests until
they are aborted, answer errors or garbage, and it records everything it was asked.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slime.utils.machine.ports import hold_port

Script = Callable[[dict[str, Any], int], Any]
_refusing = []  # sockets that are bound and do not listen, until this process ends


def refused_url() -> str:
    """An address at which nobody listens, now and later."""
    _refusing.append(hold_port("127.0.0.1"))
    return f"http://127.0.0.1:{_refusing[-1].getsockname()[1]}"


class FakeEngine:
    """`script(payload, number)` may return None (answer normally), a status code, raw text, seconds to wait
    as `{"delay_s": ...}`, `{"until": condition}`, `{"after": n}` (when n requests have come in all),
    `{"hold": True}` (until aborted, `tokens` made so far), `{"break": True}` (the connection ends),
    `{"break_when": n}` (when it has n such requests) or `{"tokens": [...], "finish": ...}`; `meta` adds to
    what an answer says about itself, `meta_of(tokens)` to what each event of a stream does. `takes_groups`:
    it answers lists of requests, each as its script says, with an event for each; one whose script is no
    answer (a status, a break) gets no event.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        num_tokens: int = 4,
        vocab: tuple[int, int] = (10, 60),
        takes_groups: bool = True,
    ):
        self.takes_groups = takes_groups
        self.group_sizes: list[int] = []
        self.script, self.num_tokens, self.vocab = script, num_tokens, vocab
        self.version = "run:1"
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of everything that was posted
        self.aborts: list[dict[str, Any]] = []
        self.aborted: set[str] = set()  # ids that were named, and those in flight that were meant
        self._in_flight: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.abort_delay_s = 0.0
        self.waiting, self.load = 0, {}  # what /v1/loads says beside the requests that run
        self._held: dict[str, asyncio.Event] = {}

    def __enter__(self) -> "FakeEngine":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> int:
        app = web.Application(middlewares=[self._note_path])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    @web.middleware
    async def _note_path(self, request: web.Request, handler) -> web.StreamResponse:
        if request.method == "POST":
            self.paths.append(request.path)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        if isinstance(payload["input_ids"][0], list):
            return await self._generate_group(request, payload)
        number = len(self.requests)
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        self.running += 1
        self._in_flight.add(payload.get("rid"))
        self.most_running = max(self.most_running, self.running)
        action = self.script(payload, number) if self.script else None
        try:
            if isinstance(action, dict) and ("break" in action or "break_when" in action):
                while self.running < action.get("break_when", 1):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # all that wait for it see it before the first of them is gone
                request.transport.abort()
                return web.Response()
            if payload.get("stream") and not isinstance(action, (int, str)):
                return await self._stream(request, payload, action or {})
            return await self._answer(payload, action)
        finally:
            self.running -= 1
            self._in_flight.discard(payload.get("rid"))

    async def _generate_group(self, request: web.Request, payload: dict) -> web.StreamResponse:
        if not self.takes_groups:
            return web.json_response({"error": "this engine takes no lists"}, status=400)
        fields = ("input_ids", "sampling_params", "rid")
        members = [
            {**payload, **dict(zip(fields, own, strict=True))}
            for own in zip(*(payload[f] for f in fields), strict=True)
        ]
        self.group_sizes.append(len(members))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def answer(place: int, member: dict) -> None:
            self.requests.append(member)
            self.headers.append(dict(request.headers))
            self.running += 1
            self._in_flight.add(member["rid"])
            self.most_running = max(self.most_running, self.running)
            try:
                action = self.script(member, len(self.requests) - 1) if self.script else None
                if isinstance(action, dict) and action.get("break"):
                    request.transport.abort()
                elif not isinstance(action, (int, str)):
                    body = json.loads((await self._answer(member, action)).body)
                    await response.write(f"data: {json.dumps({**body, 'index': place})}\n\n".encode())
            finally:
                self.running -= 1
                self._in_flight.discard(member["rid"])

        await asyncio.gather(*(answer(place, member) for place, member in enumerate(members)))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _answer(self, payload: dict, action: Any) -> web.Response:
        if isinstance(action, int):
            return web.json_response({"error": f"scripted {action}"}, status=action)
        if isinstance(action, str):
            return web.Response(text=action)
        action = action or {}
        await asyncio.sleep(action.get("delay_s", 0))
        while len(self.requests) < action.get("after", 0) or not action.get("until", lambda: True)():
            await asyncio.sleep(0.01)
        finish = action.get("finish")
        if action.get("hold"):
            self._held[payload["rid"]] = asyncio.Event()
            await self._held[payload["rid"]].wait()
            finish = "abort"
        body = self._body(payload, action.get("tokens"), finish)
        body["meta_info"] |= action.get("meta", {})
        return web.json_response(body)

    async def _stream(self, request: web.Request, payload: dict, action: dict) -> web.StreamResponse:
        """One event per token. `break_after`: the connection is cut after so many."""
        final = self._body(payload, action.get("tokens"), action.get("finish"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = final["output_ids"]
        for count in range(1, len(ids) + 1):
            last = count == len(ids) and not action.get("hold")
            body = self._body(payload, ids[:count], None) if not last else final
            body["meta_info"] |= action["meta_of"](ids[:count]) if "meta_of" in action else {}
            await self._send_event(response, body, last)
            if count == action.get("break_after"):
                request.transport.abort()
                return response
        if action.get("hold"):
            self._held[payload["rid"]] = asyncio.Event()
            await self._held[payload["rid"]].wait()
            await self._send_event(response, self._body(payload, ids, "abort"), True)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send_event(self, response: web.StreamResponse, body: dict, last: bool) -> None:
        if not last:
            body["meta_info"]["finish_reason"] = None
        await response.write(f"data: {json.dumps(body)}\n\n".encode())
        await asyncio.sleep(0.005)

    def _body(self, payload: dict, tokens: list[int] | None, finish: str | None) -> dict:
        params = payload["sampling_params"]
        limit = params["max_new_tokens"]
        if tokens is None:
            tokens = self.tokens_for(payload)[:limit]
        finish = finish or ("length" if len(tokens) >= limit else "stop")
        meta = {
            "id": payload.get("rid"),
            "finish_reason": {"type": finish},
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        return {"text": "x" * len(tokens), "output_ids": tokens, "meta_info": meta}

    def tokens_for(self, payload: dict) -> list[int]:
        low, high = self.vocab
        seed = payload["sampling_params"].get("sampling_seed", 0)
        return [low + (seed // (i + 1) + i) % (high - low) for i in range(self.num_tokens)]

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting, **self.load}
        return web.json_response({"loads": [load]})

    async def _abort(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.aborts.append(payload)
        self.aborted |= {rid for rid in self._in_flight if rid is not None and names(payload, rid)}
        self.aborted |= set() if payload.get("prefix") else {payload.get("rid")}
        await asyncio.sleep(self.abort_delay_s)
        for rid in [rid for rid in self._held if names(payload, rid)]:
            self._held.pop(rid).set()
        return web.json_response({})


def sample_index(request: dict[str, Any]) -> int:
    """Of which sample a request is, as slime names its requests: the scope, the sample, a random end."""
    return int(request["rid"].rpartition(".")[2].partition("-")[0])


def names(abort: dict[str, Any], rid: str) -> bool:
    """Whether an abort, as it was posted, is one of this request."""
    prefix = abort.get("prefix") and rid.startswith(abort["rid"])
    return bool(abort.get("abort_all") or prefix or rid == abort.get("rid"))
