"""The HTTP endpoint for agent programs: sessions by key, and one turn from its request to its record.

A response is recorded once it is written to the connection: what a client never received is not trained. When
a client disconnects, its request ends at the engine and its session continues. A client that lost a finished
response and repeats its request receives that response.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from slime.agent.adapters.client_errors import ApiError, api_error, invalid
from slime.agent.adapters.dialect import Call, ClientDialect, Reply, Stream, folded, json_object, paired
from slime.agent.adapters.live_text import LiveText, Piece
from slime.agent.engine_access import EnginePolicy, Made, Policy
from slime.agent.history import conversation
from slime.agent.parsing import parser_for
from slime.agent.rendering import History, Renderer
from slime.agent.session import Asked, Budget, Session
from slime.agent.trajectory import Message, TurnNode
from slime.arguments import PluginArgs
from slime.rollout.generation.client_requests import ClientRequests
from slime.utils import http_utils
from slime.utils.browser_guard import browser_guard
from slime.utils.types import Sample
from slime.wire.openai_shapes import model_list

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
_REMEMBERED = 4096  # closed sessions whose keys are still recognised
_POLL_S = 0.02
_MAX_UNREAD = 8


def flatten_content(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts; images leave a note."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "\n".join(filter(None, map(_text_of_part, content)))


def _text_of_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    kind = part.get("type")
    if kind in ("image", "image_url", "input_image"):
        return "[image omitted]"
    if kind in ("text", "input_text", "output_text") or (kind != "tool_result" and "content" not in part):
        return str(part.get("text") or "")
    return flatten_content(part.get("content"))


@dataclass
class _Open:
    """An open session and its requests in flight."""

    session: Session
    tasks: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = field(default_factory=dict)
    unread: dict[bytes, tuple[Asked, Made]] = field(default_factory=dict)  # finished, but never received
    last: tuple[bytes, str, Asked, Made] | None = None  # the response that was delivered last
    # Responses that a request may continue, by id; whether the first message was instructions.
    kept: dict[str, tuple[TurnNode, bool]] = field(default_factory=dict)

    def keep(self, digest: bytes, asked: Asked, made: Made) -> None:
        """Keep a response that its client lost, until the client repeats its request."""
        self.unread[digest] = (asked, made)
        if len(self.unread) > _MAX_UNREAD:
            del self.unread[next(iter(self.unread))]


@dataclass(slots=True)
class _Exchange:
    """One request and the session that it belongs to."""

    request: web.Request
    protocol: ClientDialect
    held: _Open
    body: dict[str, Any]
    digest: bytes  # of the body: a retry has the same


class BaseAdapter:
    """Serves `protocols` for any number of sessions; `app` is the aiohttp application.

    A session's key is in the path (`/sessions/KEY/v1/...`), else the Bearer token or X-Api-Key of a request;
    without any it is "default". An unknown key is refused. `fork_threshold_tokens` is accepted and ignored:
    prompts extend the token ids that exist, so that no response is ever rendered again.
    """

    protocols: ClassVar[tuple[ClientDialect, ...]] = ()

    def __init__(
        self,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[dict[str, Any]], None] | None = None,
        *,
        model_name: str = "policy",
        template_kwargs: Mapping[str, Any] | None = None,
        history: History = "template",
        policy: Policy | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        processor: Any = None,
    ) -> None:
        self.tokenizer, self.model_name = tokenizer, model_name
        self.renderer = Renderer(
            tokenizer, template_kwargs=template_kwargs, history=history, processor=processor
        )
        self.policy: Policy = policy or EnginePolicy(sglang_url)
        self.parser = parser_for(tokenizer, tool_parser, reasoning_parser)
        self.max_turns_per_sid, self.debug_callback = max_turns_per_sid, debug_callback
        self.max_body_bytes = max_body_bytes
        self._sessions: dict[str, _Open] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._folds = "a system message within the conversation" in self.renderer.report().refuses
        self.app = self._make_app()

    def _make_app(self) -> web.Application:
        # Programs in sandboxes may know this machine by any name; the key protects a session.
        guard = browser_guard(known=None, json_only=False)
        app = web.Application(client_max_size=self.max_body_bytes, middlewares=[guard])
        app.on_cleanup.append(_close_connections)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/v1/models", self._models)
        for protocol in self.protocols:
            for prefix in ("", "/sessions/{sid}"):
                path = f"{prefix}{protocol.path}"
                app.router.add_post(path, self._handler(protocol, self._turn))
                if protocol.count(0) is not None:
                    app.router.add_post(f"{path}/count_tokens", self._handler(protocol, self._count))
        app.router.add_route("*", "/{path:.*}", self._not_found)
        return app

    # -- sessions ------------------------------------------------------------------------------------------

    def open_session(
        self,
        sid: str,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int | None = None,
        *,
        budget: Budget | None = None,
        seed: int | None = None,
    ) -> Session:
        """Open a session: from now on requests with the key `sid` are its turns."""
        if sid in self._sessions:
            raise ValueError(f"session {sid!r} is open already: a key names one episode")
        defaults = dict(sampling_defaults or {})
        if budget is None:
            most = defaults.get("max_new_tokens") or 4096
            budget = Budget(self.max_turns_per_sid, max_context_tokens, most)
        session = Session(
            self.policy,
            self.renderer,
            session_id=sid,
            sampling=defaults,
            budget=budget,
            parser=self.parser,
            seed=seed,
        )
        session.client = ClientRequests()
        self._sessions[sid] = _Open(session)
        return session

    def session(self, sid: str) -> Session | None:
        held = self._sessions.get(sid)
        return held.session if held is not None else None

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5,
        max_sample_tokens: int | None = None,
        args: PluginArgs | None = None,
    ) -> list[Sample]:
        """Wait for requests in flight, close the session and return its samples, from any event loop."""
        held = self._sessions.get(sid)
        if held is None:
            raise KeyError(f"there is no session {sid!r}")
        await _until_idle(held, wait_timeout)
        await self.shutdown_session(sid)
        samples = held.session.samples(
            base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=max_sample_tokens,
            args=args,
        )
        self.drop_session(sid)
        return samples

    async def shutdown_session(self, sid: str) -> None:
        """Refuse further turns; requests in flight end, also at the engine, and are not recorded."""
        held = self._sessions.get(sid)
        if held is None:
            return
        held.session.end()
        for task, loop in list(held.tasks.items()):
            loop.call_soon_threadsafe(task.cancel)
        await _until_idle(held, 5)

    def drop_session(self, sid: str) -> None:
        """Forget a session; later requests for it get status 503."""
        held = self._sessions.pop(sid, None)
        if held is not None:
            held.session.end()
            self._over.append(sid)

    def _find(self, request: web.Request, protocol: ClientDialect, body: Mapping[str, Any]) -> _Open:
        """Return the session that a request belongs to."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else None
        named = request.match_info.get("sid") or bearer or request.headers.get("X-Api-Key")
        key = named or protocol.key_in(body) or "default"
        held = self._sessions.get(key)
        if held is not None:
            return held
        if key in self._over:
            raise ApiError(503, "closed", "this session is over", retry=False)
        raise ApiError(
            401, "auth", f"Incorrect API key provided: {key[:24]!r} names no session.", retry=False
        )

    # -- one request ---------------------------------------------------------------------------------------

    def _handler(
        self, protocol: ClientDialect, serve: Callable[[_Exchange], Any]
    ) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                raw = await request.read()
                body = json_object(raw)
                held = self._find(request, protocol, body)
                digest = hashlib.blake2b(raw, digest_size=16).digest()
                task = asyncio.current_task()
                assert task is not None, "a handler runs in a task"
                held.tasks[task] = asyncio.get_running_loop()
                try:
                    response: web.StreamResponse = await serve(
                        _Exchange(request, protocol, held, body, digest)
                    )
                    return response
                finally:
                    held.tasks.pop(task, None)
            except web.HTTPRequestEntityTooLarge:
                told = ApiError(
                    413, "too_large", f"Request exceeds {self.max_body_bytes} bytes.", retry=False
                )
            except web.RequestPayloadError as error:  # truncated, or not compressed as its header says
                told = invalid(f"We could not read the body of your request: {error}")
            except Exception as error:
                told = api_error(error)
                if told.kind == "ours":
                    logger.exception("A request of an agent program failed.")
            return web.json_response(protocol.error(told), status=told.status, headers=told.headers)

        return handle

    async def _count(self, one: _Exchange) -> web.StreamResponse:
        call = self._read(one.protocol, {"max_tokens": 1, **one.body})
        prompt_ids = one.held.session.prompt(call.messages, call.tools)[0]
        return web.json_response(one.protocol.count(len(prompt_ids)))

    def _read(self, protocol: ClientDialect, body: dict[str, Any]) -> Call:
        call = protocol.read(body)
        call.response_id, call.tokenizer = uuid4().hex[:24], self.tokenizer
        if self._folds and call.after is None:
            call.messages = folded(call.messages)
        return call

    def _with_earlier(self, held: _Open, call: Call) -> list[Message]:
        """Return the conversation that `previous_response_id` names, extended by the request.

        Instructions are those of the request alone, as in the real API.
        """
        if (known := held.kept.get(call.after or "")) is None:
            told = f"Previous response with id 'resp_{call.after}' not found."
            raise ApiError(400, "unknown_answer", told, param="previous_response_id", retry=False)
        node, had_instructions = known
        head = int(call.has_instructions)
        before = conversation(node)[int(had_instructions) :]
        messages = [*call.messages[:head], *before, *call.messages[head:]]
        return paired(folded(messages) if self._folds else messages)

    async def _turn(self, one: _Exchange) -> web.StreamResponse:
        held, call = one.held, self._read(one.protocol, one.body)
        if call.after is not None:
            call.messages = self._with_earlier(held, call)
        if (lost := held.unread.pop(one.digest, None)) is not None:
            return await self._respond(one, call, lost[0], _again(lost[1]))
        # The SDKs of OpenAI and Anthropic mark a retry.
        is_retry = one.request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        if is_retry and held.last is not None and held.last[0] == one.digest:
            _, call.response_id, asked, made = held.last
            return await self._respond(one, call, asked, _again(made), record=False)
        asked = held.session.ask(call.messages, call.tools, call.sampling)
        return await self._respond(one, call, asked, held.session.stream(asked, whole=not call.stream))

    async def _respond(
        self,
        one: _Exchange,
        call: Call,
        asked: Asked,
        answers: AsyncGenerator[Made, None],
        *,
        record: bool = True,
    ) -> web.StreamResponse:
        """Write a response, and record it once it is written.

        The headers of a stream are sent with its first token, so that earlier errors have a status.
        """
        held, stream, live = one.held, one.protocol.stream(call), self._live(call, asked)
        response: web.StreamResponse | None = None
        made, seen = Made(), 0
        try:
            async with contextlib.aclosing(answers):
                async for made in answers:
                    if call.stream and response is None:
                        response = await _begin(one.request, stream.start(asked.num_prompt))
                    pieces = list(live.feed(made.ids)) if response and made.finish is None else []
                    if response and pieces:
                        new = _slice(made, seen)
                        seen = len(made.ids)
                        await response.write(b"".join(_written(stream, pieces, new)))
            reply = self._reply(held, call, asked, made)
            if response is not None:
                pieces = list(live.rest(reply.parsed)) or [("text", "")]
                written = _written(stream, pieces, _slice(made, seen))
                await response.write(b"".join([*written, stream.end(reply)]))
            else:
                response = web.json_response(one.protocol.answer(reply))
                await response.prepare(one.request)
                await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            if record and made.finish is not None:
                held.keep(one.digest, asked, made)
            raise
        except Exception as error:
            if response is None or not call.stream:
                raise
            told = api_error(error)
            logger.warning("Session %s: a streamed response broke: %s", held.session.session_id, told.message)
            await response.write(stream.error(told))
            return response
        if record:
            self._record(one, reply)
        await response.write_eof()
        return response

    def _reply(self, held: _Open, call: Call, asked: Asked, made: Made) -> Reply:
        tools = asked.tools if call.uses_tools else []
        parsed = self.parser(held.session.text_of(made), tools, asked.opens_thought)
        return Reply(call, asked, made, parsed, held.session.message_of(asked, parsed))

    def _live(self, call: Call, asked: Asked) -> LiveText:
        marks = self.parser.starts if asked.tools and call.uses_tools else ()
        stops = call.sampling.get("stop") or ()
        return LiveText(
            self.tokenizer,
            marks=marks,
            stops=stops,
            opens_thought=asked.opens_thought,
            held=self.parser.needs_all,
        )

    def _record(self, one: _Exchange, reply: Reply) -> None:
        held = one.held
        node = held.session.record(reply.asked, reply.made, reply.parsed).node
        reply.asked.prompt_ids = []  # the tree has them
        held.last = (one.digest, reply.call.response_id, reply.asked, reply.made)
        if reply.call.keeps:
            held.kept[reply.call.response_id] = (node, reply.call.has_instructions)
        if self.debug_callback is not None:
            self.debug_callback(
                {
                    "sid": held.session.session_id,
                    "turn": node.number,
                    "messages": reply.call.messages,
                    "answer": reply.message,
                    "prompt_tokens": reply.num_prompt,
                    "output_tokens": len(reply.made.ids),
                }
            )

    # -- the rest ------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _not_found(self, request: web.Request) -> web.Response:
        error = ApiError(404, "not_found", f"Invalid URL ({request.method} {request.path})", retry=False)
        return web.json_response(self.protocols[0].error(error), status=404, headers=error.headers)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(model_list([self.model_name]))


async def _until_idle(held: _Open, timeout_s: float) -> None:
    """Wait until a session has no request in flight, from any event loop."""
    deadline = time.monotonic() + timeout_s
    while held.tasks and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


async def _close_connections(app: web.Application) -> None:
    """Close the connections to the engines, which belong to the application's event loop."""
    await http_utils.close_session()


async def _again(made: Made) -> AsyncGenerator[Made, None]:
    yield made


async def _begin(request: web.Request, first: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(first)
    return response


def _slice(made: Made, start: int) -> Made:
    return Made(made.ids[start:], made.log_probs[start:], [], made.finish, made.stop_id)


def _written(stream: Stream, pieces: list[Piece], new: Made) -> Iterator[bytes]:
    """Yield the events of the pieces; new tokens travel with the first."""
    for place, (kind, text) in enumerate(pieces):
        yield stream.piece(kind, text, new if place == 0 else None)
