"""Requests for one turn to the policy's engines, whole or streamed; weight pushes may interrupt them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from slime.agent.shown_pictures import PromptImages
from slime.arguments import PluginArgs
from slime.rollout.generation.generate_request import wrong_images
from slime.rollout.generation.turn_gate import current_gate
from slime.utils import http_utils, top_p
from slime.utils.errors import EngineAnswerError
from slime.wire.client import EngineClient
from slime.wire.protocol import ADAPTER_NAME, Finish, GenerateRequest, Generation, SamplingParams

logger = logging.getLogger(__name__)

MAX_IDLE = 60  # responses without a token from a paused engine, a second apart
ABORT_DEADLINE_S = 10.0


class PolicyDown(RuntimeError):
    """The engines gave no response to a request."""


@dataclass(slots=True)
class Made:
    """The tokens of a response so far, over all its requests. `finish` None: more will follow."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # weight versions: version, start, end
    finish: Finish | None = None
    stop_id: int | None = None  # the token by which it ended
    stop_text: str | None = None  # or the stop string
    meta: dict[str, Any] = field(default_factory=dict)

    def meta_info(self) -> dict[str, Any]:
        """Return the meta info that an engine would give for one response with all these tokens."""
        return {**self.meta, "weight_versions": self.spans}

    def plus(self, answer: Generation, *, final: bool) -> Made:
        """Return a new value with `answer` appended."""
        start = len(self.ids)
        spans = [
            {"version": span.version, "start": span.start + start, "end": span.end + start}
            for span in answer.spans
        ]
        matched = answer.finish_detail.get("matched")
        by_token = isinstance(matched, int) and bool(answer.ids) and answer.ids[-1] == matched
        kept = {
            k: v
            for k, v in answer.meta.items()
            if k not in ("output_token_logprobs", "input_token_logprobs", "weight_versions")
        }
        if self.meta:  # the first request counted the prompt tokens
            kept |= {k: self.meta[k] for k in ("prompt_tokens", "cached_tokens") if k in self.meta}
            kept["completion_tokens"] = start + len(answer.ids)
            kept |= _joined_nucleus(self.meta, answer.meta)
        return Made(
            ids=[*self.ids, *answer.ids],
            log_probs=[*self.log_probs, *(answer.log_probs or ())],
            spans=_joined([*self.spans, *spans]),
            finish=answer.finish if final else None,
            stop_id=matched if by_token and answer.finish == "stop" else None,
            stop_text=matched if isinstance(matched, str) else None,
            meta=kept,
        )


def _joined(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbouring spans of one version."""
    out: list[dict[str, Any]] = []
    for span in spans:
        if out and out[-1]["version"] == span["version"] and out[-1]["end"] == span["start"]:
            out[-1] = {**out[-1], "end": span["end"]}
        else:
            out.append(span)
    return out


def _joined_nucleus(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Join the ids from which the tokens of two responses were drawn, if engines report them."""
    first, second = top_p.from_meta(before), top_p.from_meta(after)
    if first is None or second is None:
        return {}
    ids, offsets = top_p.joined(*first, *second)
    return {"top_p_token_ids": ids.tolist(), "top_p_token_offsets": offsets.tolist()}


class Policy(Protocol):
    """What a session sends its turns to: `EnginePolicy`, or a test double."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> Made: ...

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> AsyncGenerator[Made, None]: ...


class EnginePolicy:
    """The engines at one address. Cancelling a task that waits for a response aborts its request.

    An engine that is paused for a weight push with SGLang's "abort" mode drops its requests: they are sent
    again with the tokens so far, and each token keeps its weight version. A request that the end of a rollout
    interrupted continues once its gate lets the next request pass.
    """

    def __init__(
        self, url: str, *, client: EngineClient | None = None, extra: Mapping[str, Any] | None = None
    ):
        self.url = url.rstrip("/")
        self.client = client or EngineClient(self.url)
        self.extra = dict(extra or {})  # of every request: `lora_path`, say

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> Made:
        """Return the whole response."""
        made = Made()
        async for request in self._requests(prompt_ids, sampling, session, images, stream=False, made=made):
            answer = await self._ask(request)
            _copy_into(made, made.plus(answer, final=answer.finish != "abort"))
        return made

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> AsyncGenerator[Made, None]:
        """Yield the response so far, again and again; the last value has a `finish`."""
        made = Made()
        async for request in self._requests(prompt_ids, sampling, session, images, stream=True, made=made):
            before = replace(made)
            async with aclosing(self._events(request)) as events:
                async for answer, final in events:
                    _copy_into(made, before.plus(answer, final=final and answer.finish != "abort"))
                    if len(made.ids) > len(before.ids) or made.finish is not None:
                        yield made

    async def _requests(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        session: str | None,
        images: PromptImages | None,
        *,
        stream: bool,
        made: Made,
    ) -> AsyncIterator[GenerateRequest]:
        """Yield requests until `made`, which the caller fills after each, is finished."""
        params, idle, gate = SamplingParams.from_json(dict(sampling)), 0, current_gate()
        wire = images.wire_ids if images is not None else list(prompt_ids)
        while made.finish is None:
            scope = await gate.passing() if gate is not None else None
            left = params
            if params.max_new_tokens is not None:
                room = params.max_new_tokens - len(made.ids)
                if room <= 0 and made.ids:
                    made.finish = "length"
                    return
                left = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
            count = len(made.ids)
            yield GenerateRequest(
                input_ids=[*wire, *made.ids] if made.ids else wire,
                image_data=images.urls if images is not None else (),
                num_prompt_tokens=len(prompt_ids) + count if images is not None else None,
                forbidden_ids=frozenset() if images is None else frozenset((images.image_token_id,)),
                sampling=left,
                rid=f"{scope.name if scope is not None else ''}{uuid4().hex}",
                stream=stream,
                session=session,
                extra=self.extra,
            )
            if scope is not None and scope.aborted:
                continue  # the rollout ended, not the engine: the gate decides
            idle = 0 if len(made.ids) > count else idle + 1
            if made.finish is None and idle:
                if idle > MAX_IDLE:
                    raise PolicyDown(f"the engine aborted a turn {idle} times without a token")
                await asyncio.sleep(min(1.0, 0.05 * 2 ** min(idle, 10)))

    async def _ask(self, request: GenerateRequest) -> Generation:
        try:
            with _in_flight(request) as made:
                answer = await self.client.generate(request)
                made(len(answer.ids))
                return _checked(answer, request)
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(request.rid))
            raise

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[tuple[Generation, bool], None]:
        ended, count = False, 0
        try:
            with _in_flight(request) as made:
                async with aclosing(self.client.stream(request)) as events:
                    async for event in events:
                        answer, ended = _read_event(event, request)
                        made(len(answer.ids) - count)
                        count = len(answer.ids)
                        yield answer, ended
        except http_utils.HttpError as error:
            if 400 <= error.status < 500:
                raise
            # `_requests` asks for the rest.
            logger.info("A stream from an engine broke; the rest is requested again: %s", error)
        finally:
            if not ended:
                await asyncio.shield(self.abort(request.rid))

    async def abort(self, rid: str | None) -> None:
        """Abort a request at the worker that has it."""
        if rid is None:
            return
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                await self.client.cancel(await self._workers(), [rid])
        except (TimeoutError, http_utils.HttpError) as error:
            why = str(error) or f"no answer within {ABORT_DEADLINE_S:g} s"
            logger.warning("Request %s could not be aborted: %s", rid, why)

    async def _workers(self) -> list[str]:
        """Return the workers: a router forwards no aborts; a single engine is its own worker."""
        try:
            answer = await http_utils.get(f"{self.url}/workers", timeout_s=ABORT_DEADLINE_S)
            return [worker["url"] for worker in answer["workers"]]
        except (http_utils.HttpError, KeyError, TypeError):
            return [self.url]


def _in_flight(request: GenerateRequest) -> contextlib.AbstractContextManager[Callable[[int], object]]:
    gate = current_gate()
    return gate.sending(request.rid) if gate is not None else contextlib.nullcontext(int)


def _copy_into(made: Made, new: Made) -> None:
    for name in Made.__slots__:
        setattr(made, name, getattr(new, name))


def _read_event(event: Mapping[str, Any], request: GenerateRequest) -> tuple[Generation, bool]:
    """Return an event, and whether it is the last: only then it has a finish reason."""
    try:
        meta = dict(event["meta_info"])
        ended = meta.get("finish_reason") is not None
        meta["finish_reason"] = meta.get("finish_reason") or {"type": "abort"}
        return _checked(Generation.from_json({**event, "meta_info": meta}), request), ended
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"an event of the engine's stream is wrong: {error}") from error


def _checked(answer: Generation, request: GenerateRequest) -> Generation:
    """Check the log-probs and images of a response before it becomes training data."""
    if answer.log_probs is None or not all(map(math.isfinite, answer.log_probs)):
        raise EngineAnswerError("the engine returned a turn without log-probs: its tokens cannot be trained")
    if (wrong := wrong_images(request, answer)) is not None:
        raise EngineAnswerError(f"the engine's response to a turn is wrong: {wrong}")
    return answer


@functools.lru_cache(maxsize=8)
def _policy_at(url: str, loop: asyncio.AbstractEventLoop, extra: tuple[tuple[str, Any], ...]) -> EnginePolicy:
    return EnginePolicy(url, extra=dict(extra))


def policy_of(args: PluginArgs) -> EnginePolicy:
    """Return the policy of the run that calls a generate function; one for each event loop."""
    if args.sglang_router_ip is None:
        raise RuntimeError("no engine serves this run (router address is not set): there is no policy to ask")
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    extra: tuple[tuple[str, Any], ...] = ()
    if args.lora_sync == "adapter":
        extra += (("lora_path", ADAPTER_NAME),)
    if args.use_rollout_routing_replay:
        extra += (("return_routed_experts", True),)
    return _policy_at(url, asyncio.get_running_loop(), extra)
