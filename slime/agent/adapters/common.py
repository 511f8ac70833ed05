"""The endpoint itself: sessions by key, one turn from request to record, and what a client is told.

An answer is recorded when its last byte that matters was handed to the connection: what a client never got is
not trained. A client that leaves ends its request at the engine, and its session goes on. A client that lost
an answer which was already made, and repeats its request, gets that answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from slime.agent.adapters.bodies import Body, Known, read_body
from slime.agent.adapters.chat_calls import Call, folded, paired
from slime.agent.adapters.client_errors import ApiError, api_error, invalid
from slime.agent.adapters.dialect import ClientDialect, Reply, Stream
from slime.agent.adapters.live_text import LiveText, Piece
from slime.agent.engine_access import EnginePolicy, Made, Policy
from slime.agent.parsing import FormatParser, parser_for
from slime.agent.rendering import History, Message, Renderer
from slime.agent.session import Asked, Budget, Session
from slime.agent.trajectory import TurnNode
from slime.arguments import PluginArgs
from slime.rollout.generation.client_requests import ClientRequests
from slime.utils import http_utils
from slime.utils.browser_guard import browser_guard
from slime.utils.types import Sample
from slime.wire.openai_shapes import model_list

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
_REMEMBERED = 4096  # sessions that are over and known as such
_POLL_S = 0.02
_MAX_UNREAD = 8


def flatten_content(content: Any) -> str:
    """The text of a message's content in the form of either API: a string, or a list of parts.

    Pictures leave a note in their place, because a chat template gets text alone.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else str(content)
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
    """A session and its requests in flight."""

    session: Session
    tasks: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = field(default_factory=dict)
    unread: dict[bytes, tuple[Asked, Made]] = field(default_factory=dict)  # made, and lost on the way
    last: tuple[bytes, str, Asked, Made] | None = None  # what was delivered last
    kept: dict[str, tuple[TurnNode, bool]] = field(default_factory=dict)  # by id: answers to go on with
    known: Known = field(default_factory=Known)

    def keep(self, digest: bytes, asked: Asked, made: Made) -> None:
        """Keep an answer for a client that asks again; of those that never do, a few are kept."""
        self.unread[digest] = (asked, made)
        while len(self.unread) > _MAX_UNREAD:
            del self.unread[next(iter(self.unread))]


class BaseAdapter:
    """Serves `protocols` for any number of sessions; `app` is the aiohttp application.

    A session's key is in the path (`/sessions/KEY/v1/...`), else the Bearer token or X-Api-Key of a request;
    without any it is "default". An unknown key is refused. `fork_threshold_tokens` is taken and does nothing:
    prompts extend the ids that exist, so that no answer is ever replaced by a rendering of it.
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
        # Programs in sandboxes may know this machine by any name, and name no type; a session has a key.
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
        """From now on requests with the key `sid` are turns of this session."""
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
        """Wait a while for what is in flight, close the session, give its samples. Any event loop may."""
        held = self._sessions.get(sid)
        if held is None:
            raise KeyError(f"there is no session {sid!r}")
        deadline = time.monotonic() + wait_timeout
        while held.tasks and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
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
        """No further turn is taken; those in flight end, also at the engine, and are not recorded."""
        held = self._sessions.get(sid)
        if held is None:
            return
        held.session.end()
        for task, loop in list(held.tasks.items()):
            loop.call_soon_threadsafe(task.cancel)
        deadline = time.monotonic() + 5
        while held.tasks and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def drop_session(self, sid: str) -> None:
        """Forget it. Requests that still come for it are told that it is over."""
        held = self._sessions.pop(sid, None)
        if held is not None:
            held.session.end()
            self._over.append(sid)

    def _find(self, request: web.Request, protocol: ClientDialect, raw: bytes) -> tuple[_Open, Body]:
        """Whose request it is, and what it says."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else None
        named = request.match_info.get("sid") or bearer or request.headers.get("X-Api-Key")
        held = self._sessions.get(named) if named else None
        body = read_body(raw, protocol.path, held.known if held is not None else Known())
        key = named or protocol.key_in(body.fields) or "default"
        held = self._sessions.get(key)
        if held is not None:
            return held, body
        if key in self._over:
            raise ApiError(503, "closed", "this session is over", retry=False)
        raise ApiError(
            401, "auth", f"Incorrect API key provided: {key[:24]!r} names no session.", retry=False
        )

    # -- one request ---------------------------------------------------------------------------------------

    def _handler(
        self, protocol: ClientDialect, serve: Callable[[web.Request, ClientDialect, _Open, Body], Any]
    ) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                raw = await request.read()
                held, body = self._find(request, protocol, raw)
                task = asyncio.current_task()
                assert task is not None, "a handler runs in a task"
                held.tasks[task] = asyncio.get_running_loop()
                try:
                    response: web.StreamResponse = await serve(request, protocol, held, body)
                    return response
                finally:
                    held.tasks.pop(task, None)
            except web.HTTPRequestEntityTooLarge:
                told = ApiError(
                    413, "too_large", f"Request exceeds {self.max_body_bytes} bytes.", retry=False
                )
            except web.RequestPayloadError as error:  # a body that is cut, or not packed as it says
                told = invalid(f"We could not read the body of your request: {error}")
            except Exception as error:
                told = api_error(error)
                if told.kind == "ours":
                    logger.exception("a request of an agent failed")
            return web.json_response(protocol.error(told), status=told.status, headers=told.headers)

        return handle

    async def _count(
        self, request: web.Request, protocol: ClientDialect, held: _Open, body: Body
    ) -> web.StreamResponse:
        call = self._read(protocol, replace(body, fields={"max_tokens": 1, **body.fields}))
        return web.json_response(protocol.count(held.session.count_tokens(call.messages, call.tools)))

    def _read(self, protocol: ClientDialect, body: Body) -> Call:
        call = protocol.read(body)
        call.response_id, call.tokenizer = uuid4().hex[:24], self.tokenizer
        if self._folds and call.after is None:
            call.messages = folded(call.messages)
        return call

    def _with_earlier(self, held: _Open, call: Call) -> list[Message]:
        """The conversation that a request names by its last answer, with what the request adds to it.

        Instructions are those of the request alone, as in the real API.
        """
        if (known := held.kept.get(call.after or "")) is None:
            told = f"Previous response with id 'resp_{call.after}' not found."
            raise ApiError(400, "unknown_answer", told, param="previous_response_id", retry=False)
        node, had_instructions = known
        head = int(call.has_instructions)
        before = held.session.conversation(node)[int(had_instructions) :]
        messages = [*call.messages[:head], *before, *call.messages[head:]]
        return paired(folded(messages) if self._folds else messages)

    async def _turn(
        self, request: web.Request, protocol: ClientDialect, held: _Open, body: Body
    ) -> web.StreamResponse:
        call = self._read(protocol, body)
        if call.after is not None:
            call.messages = self._with_earlier(held, call)
        digest = body.digest
        again = held.unread.pop(digest, None)
        if again is None and held.last is not None and held.last[0] == digest and _is_retry(request):
            call.response_id = held.last[1]
            return await self._deliver(request, protocol, held, call, *held.last[2:], record=False)
        if again is not None:
            return await self._deliver(request, protocol, held, call, *again, digest=digest)
        asked = held.session.ask(call.messages, call.tools, call.sampling)
        if call.stream:
            return await self._stream(request, protocol, held, call, asked, digest)
        made = await held.session.complete(asked)
        return await self._deliver(request, protocol, held, call, asked, made, digest=digest)

    def _reply(self, held: _Open, call: Call, asked: Asked, made: Made) -> Reply:
        tools = asked.tools if call.uses_tools else []
        text = held.session.text_of(made)
        parsed = self.parser(text, tools, asked.opens_thought)
        return Reply(call, held.session, asked, made, parsed, held.session.message_of(asked, parsed))

    async def _deliver(
        self,
        request: web.Request,
        protocol: ClientDialect,
        held: _Open,
        call: Call,
        asked: Asked,
        made: Made,
        *,
        digest: bytes = b"",
        record: bool = True,
    ) -> web.StreamResponse:
        """Write an answer that exists; it is recorded once it is written."""
        reply = self._reply(held, call, asked, made)
        response: web.StreamResponse
        try:
            if call.stream:
                stream = protocol.stream(call)
                live = self._live(call, asked)
                response = await _begin(request, stream.start(reply.num_prompt))
                await response.write(b"".join(self._last_pieces(live, stream, reply)))
            else:
                response = web.json_response(protocol.answer(reply))
                await response.prepare(request)
                await response.write_eof()
        except BaseException:
            if record:
                held.keep(digest, asked, made)
            raise
        if record:
            self._record(held, reply, digest)
        await response.write_eof()
        return response

    async def _stream(
        self,
        request: web.Request,
        protocol: ClientDialect,
        held: _Open,
        call: Call,
        asked: Asked,
        digest: bytes,
    ) -> web.StreamResponse:
        """Write an answer as it is made. Headers go with the first token: before it errors have a status."""
        stream, live = protocol.stream(call), self._live(call, asked)
        response: web.StreamResponse | None = None
        made, seen = Made(), 0
        try:
            async with contextlib.aclosing(held.session.stream(asked)) as answers:
                async for made in answers:
                    if response is None:
                        response = await _begin(request, stream.start(asked.num_prompt))
                    pieces = list(live.feed(made.ids)) if made.finish is None else []
                    if pieces:
                        new = _slice(made, seen)
                        seen = len(made.ids)
                        await response.write(b"".join(_written(stream, pieces, new)))
            assert response is not None, "an answer has a last event"
            reply = self._reply(held, call, asked, made)
            await response.write(b"".join(self._last_pieces(live, stream, reply, seen)))
        except (asyncio.CancelledError, ConnectionError):
            if made.finish is not None:
                held.keep(digest, asked, made)
            raise
        except Exception as error:
            if response is None:
                raise
            told = api_error(error)
            logger.warning("a streamed answer broke: %s", told.message)
            await response.write(stream.error(told))
            return response
        self._record(held, reply, digest)
        await response.write_eof()
        return response

    def _live(self, call: Call, asked: Asked) -> LiveText:
        marks = self.parser.starts if asked.tools and call.uses_tools else ()
        stops = call.sampling.get("stop") or ()
        held = isinstance(self.parser, FormatParser) and self.parser.needs_all
        return LiveText(
            self.tokenizer, marks=marks, stops=stops, opens_thought=asked.opens_thought, held=held
        )

    def _last_pieces(self, live: LiveText, stream: Stream, reply: Reply, seen: int = 0) -> Iterator[bytes]:
        pieces = list(live.rest(reply.parsed))
        yield from _written(stream, pieces or [("text", "")], _slice(reply.made, seen))
        yield stream.end(reply)

    def _record(self, held: _Open, reply: Reply, digest: bytes) -> None:
        node = held.session.record(reply.asked, reply.made, reply.parsed).node
        reply.asked.prompt_ids = []  # the tree has them
        held.last = (digest, reply.call.response_id, reply.asked, reply.made)
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


async def _close_connections(app: web.Application) -> None:
    """Those to the engines, which belong to the loop that the application ran in."""
    await http_utils.close_session()


def _is_retry(request: web.Request) -> bool:
    """OpenAI's and Anthropic's SDKs say when they send a request again."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


async def _begin(request: web.Request, first: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(first)
    return response


def _slice(made: Made, start: int) -> Made:
    return Made(made.ids[start:], made.log_probs[start:], [], made.finish, made.stop_id)


def _written(stream: Stream, pieces: list[Piece], new: Made) -> Iterator[bytes]:
    """Tokens travel with the first of the pieces that came with them."""
    for place, (kind, text) in enumerate(pieces):
        yield stream.piece(kind, text, new if place == 0 else None)
