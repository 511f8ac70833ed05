"""The HTTP endpoint for agent programs: sessions by key, and one turn from its request to its record.

A response is recorded once it is written to the connection; a response that a client never received is not
trained on. When a client disconnects, its request ends at the engine and its session continues. A stream
sends the events of a response when it is complete; until then comments keep the connection alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from slime.agent.adapters.client_errors import ApiError, api_error, invalid
from slime.agent.adapters.dialect import Call, ClientDialect, Reply, folded, json_object
from slime.agent.engine_access import EnginePolicy, Made, Policy
from slime.agent.parsing import ParsedModelOutput, parser_for
from slime.agent.rendering import History, Renderer
from slime.agent.session import Asked, Budget, Session
from slime.arguments import PluginArgs
from slime.rollout import ledger
from slime.rollout.generation.client_requests import ClientRequests
from slime.utils import http_utils
from slime.utils.browser_guard import browser_guard
from slime.utils.types import Sample
from slime.wire.openai_shapes import model_list

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
_REMEMBERED = 4096  # closed sessions whose keys are still recognised
_POLL_S = 0.02
_KEEP_ALIVE_S = 15.0


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

    def _find(self, request: web.Request) -> _Open:
        """Return the session that a request belongs to."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else None
        named = request.match_info.get("sid") or bearer or request.headers.get("X-Api-Key")
        key = named or "default"
        held = self._sessions.get(key)
        if held is not None:
            return held
        if key in self._over:
            raise ApiError(503, "closed", "this session is over", retry=False)
        durable = ledger.current()
        if durable is not None and key in durable.sessions_to_come():
            raise ApiError(503, "engine", "this session resumes soon: its run was started again")
        raise ApiError(
            401, "auth", f"Incorrect API key provided: {key[:24]!r} belongs to no session.", retry=False
        )

    # -- one request ---------------------------------------------------------------------------------------

    def _handler(
        self,
        protocol: ClientDialect,
        serve: Callable[[web.Request, _Open, ClientDialect, dict[str, Any]], Any],
    ) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = json_object(await request.read())
                held = self._find(request)
                task = asyncio.current_task()
                assert task is not None, "a handler runs in a task"
                held.tasks[task] = asyncio.get_running_loop()
                try:
                    response: web.StreamResponse = await serve(request, held, protocol, body)
                    return response
                finally:
                    held.tasks.pop(task, None)
            except web.HTTPRequestEntityTooLarge:
                message = ApiError(
                    413, "too_large", f"Request exceeds {self.max_body_bytes} bytes.", retry=False
                )
            except web.RequestPayloadError as error:  # truncated, or not compressed as its header says
                message = invalid(f"We could not read the body of your request: {error}")
            except Exception as error:
                message = api_error(error)
                if message.kind == "ours":
                    logger.exception(
                        "A request of an agent program failed; the program gets an error response."
                    )
            return web.json_response(protocol.error(message), status=message.status, headers=message.headers)

        return handle

    async def _count(
        self, request: web.Request, held: _Open, protocol: ClientDialect, body: dict[str, Any]
    ) -> web.StreamResponse:
        call = self._read(protocol, {"max_tokens": 1, **body})
        prompt_ids = held.session.prompt(call.messages, call.tools)[0]
        return web.json_response(protocol.count(len(prompt_ids)))

    def _read(self, protocol: ClientDialect, body: dict[str, Any]) -> Call:
        call = protocol.read(body)
        call.response_id, call.tokenizer = uuid4().hex[:24], self.tokenizer
        if self._folds:
            call.messages = folded(call.messages)
        return call

    async def _turn(
        self, request: web.Request, held: _Open, protocol: ClientDialect, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Generate a response and write it; record it once it is written."""
        call = self._read(protocol, body)
        asked = held.session.ask(call.messages, call.tools, call.sampling)
        try:
            return await self._respond(request, held, call, asked, protocol)
        except BaseException:
            if held.session.past is not None:
                held.session.past.forget(asked)
            raise

    async def _respond(
        self, request: web.Request, held: _Open, call: Call, asked: Asked, protocol: ClientDialect
    ) -> web.StreamResponse:
        work = asyncio.ensure_future(held.session.generate(asked))
        response: web.StreamResponse | None = None
        try:
            while not (await asyncio.wait([work], timeout=_KEEP_ALIVE_S if call.stream else None))[0]:
                # The headers are sent late, so that errors before have a status.
                response = response or await _begin(request)
                await response.write(b": the model is writing\n\n")
            reply = self._reply(held, call, asked, work.result())
        except Exception as error:
            if response is None:
                raise
            message = api_error(error)
            logger.warning("Session %s: a stream ended early: %s", held.session.session_id, message.message)
            await response.write(protocol.error_event(message, call))
            return response
        finally:
            work.cancel()
            await asyncio.wait([work])  # an abort reaches the engine before the request counts as ended
        if call.stream:
            response = response or await _begin(request)
            await response.write(protocol.events(reply))
        else:
            response = web.json_response(protocol.answer(reply))
            await response.prepare(request)
            await response.write_eof()
        self._record(held, reply)
        await response.write_eof()
        return response

    def _reply(self, held: _Open, call: Call, asked: Asked, made: Made) -> Reply:
        tools = asked.tools if call.uses_tools else []
        parsed = self.parser(held.session.text_of(made), tools, asked.opens_thought)
        if "json_schema" in call.sampling:  # the whole response is JSON, without thoughts or marks of calls
            parsed = ParsedModelOutput(text=held.session.text_of(made), ill_formed=call.must_call)
        if call.must_call:
            with contextlib.suppress(ValueError):  # a limit of tokens may have ended it
                use = json.loads(parsed.text)
                parsed = ParsedModelOutput(tool_uses=[{"name": use["name"], "input": use["arguments"]}])
        return Reply(call, asked, made, parsed, held.session.message_of(asked, parsed))

    def _record(self, held: _Open, reply: Reply) -> None:
        node = held.session.record(reply.asked, reply.made, reply.parsed).node
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


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response
