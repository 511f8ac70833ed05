"""Requests for one turn to the policy's engines, whole or streamed; weight pushes may interrupt them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from slime.agent.shown_pictures import PromptImages
from slime.agent.trajectory import PER_TOKEN_META
from slime.arguments import PluginArgs
from slime.rollout.generation.generate_request import wrong_images
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.turn_gate import current_gate
from slime.utils import http_utils, top_p
from slime.utils.errors import EngineResponseError
from slime.wire.client import EngineClient
from slime.wire.protocol import ADAPTER_NAME, Finish, GenerateRequest, Generation, SamplingParams

logger = logging.getLogger(__name__)

MAX_IDLE = 60  # responses without a token from a paused engine, a second apart
ABORT_DEADLINE_S = 10.0


class PolicyDown(RuntimeError):
    """The engines gave no response to a request."""


@dataclass(slots=True)
class Made:
    """The tokens of a response so far, over all its requests. `finish` None: it is not complete."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # weight versions: version, start, end
    finish: Finish | None = None
    stop_id: int | None = None  # the token by which it ended
    stop_text: str | None = None  # or the stop string
    meta: dict[str, Any] = field(default_factory=dict)

    def plus(self, answer: Generation) -> Made:
        """Return a new value with `answer` appended."""
        start = len(self.ids)
        spans = [
            {"version": span.version, "start": span.start + start, "end": span.end + start}
            for span in answer.spans
        ]
        matched = answer.finish_detail.get("matched")
        by_token = isinstance(matched, int) and bool(answer.ids) and answer.ids[-1] == matched
        kept = {k: v for k, v in answer.meta.items() if k not in PER_TOKEN_META}
        if self.meta:  # the first request counted the prompt tokens
            kept |= {k: self.meta[k] for k in ("prompt_tokens", "cached_tokens") if k in self.meta}
            kept["completion_tokens"] = start + len(answer.ids)
            first, second = top_p.from_meta(self.meta), top_p.from_meta(answer.meta)
            if first is not None and second is not None:  # the ids from which the tokens were drawn
                ids, offsets = top_p.joined(*first, *second)
                kept |= {"top_p_token_ids": ids.tolist(), "top_p_token_offsets": offsets.tolist()}
        return Made(
            ids=[*self.ids, *answer.ids],
            log_probs=[*self.log_probs, *(answer.log_probs or ())],
            spans=_joined([*self.spans, *spans]),
            finish=answer.finish if answer.finish != "abort" else None,
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


class Policy(Protocol):
    """Interface through which a session samples its turns: `EnginePolicy`, or a test double."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> Made: ...


class EnginePolicy:
    """The engines at one address. Cancelling a task that waits for a response aborts its request.

    An engine that is paused for a weight push with SGLang's "abort" mode drops its requests: they are sent
    again with the tokens so far, and each token keeps its weight version. A request that the end of a rollout
    interrupted continues once its gate lets the next request pass.
    """

    def __init__(self, url: str, *, extra: Mapping[str, Any] | None = None):
        self.url = url.rstrip("/")
        self.client = EngineClient(self.url)
        self.extra = dict(extra or {})  # of every request: `lora_path`, say

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: PromptImages | None = None,
    ) -> Made:
        """Return the whole response, which may take several requests."""
        params, made, idle, gate = SamplingParams.from_json(dict(sampling)), Made(), 0, current_gate()
        wire = images.wire_ids if images is not None else list(prompt_ids)
        while True:
            scope = await gate.passing() if gate is not None else None
            count, left = len(made.ids), params
            if params.max_new_tokens is not None:
                room = params.max_new_tokens - count
                if room <= 0 and count:
                    return replace(made, finish="length")
                left = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
            request = GenerateRequest(
                input_ids=[*wire, *made.ids],
                image_data=images.urls if images is not None else (),
                num_prompt_tokens=len(prompt_ids) + count if images is not None else None,
                forbidden_ids=frozenset() if images is None else frozenset((images.image_token_id,)),
                sampling=left,
                rid=f"{scope.name if scope is not None else ''}{uuid4().hex}",
                session=session,
                extra=self.extra,
            )
            made = made.plus(await self._send(request))
            if made.finish is not None:
                return made
            if params.json_schema is not None:
                made = Made()  # an engine's grammar starts with a response, so this one does again
            if scope is not None and scope.aborted:
                continue  # the rollout ended, not the engine: the gate decides
            idle = 0 if len(made.ids) > count else idle + 1
            if idle > MAX_IDLE:
                raise PolicyDown(f"the engine aborted a turn {idle} times before its first token")
            if idle:
                await asyncio.sleep(min(1.0, 0.05 * 2 ** min(idle, 10)))

    async def _send(self, request: GenerateRequest) -> Generation:
        """Send one request; abort it at the engine if the caller stops waiting for it."""
        gate = current_gate()
        try:
            with (
                gate.sending(request.rid) if gate is not None else contextlib.nullcontext(int) as note_tokens
            ):
                answer = _checked(await self.client.generate(request), request)
                note_tokens(len(answer.ids))
                return answer
        except (http_utils.HttpError, EngineResponseError):
            raise  # the engine has no such request any more
        except BaseException:
            await asyncio.shield(self.abort(str(request.rid)))
            raise

    async def abort(self, rid: str) -> None:
        """Abort a request at the worker that has it."""
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


def _checked(answer: Generation, request: GenerateRequest) -> Generation:
    """Check the log-probs and images of a response before it becomes training data."""
    if answer.log_probs is None or not all(map(math.isfinite, answer.log_probs)):
        raise EngineResponseError(
            "the engine returned a turn without log-probs: its tokens cannot be trained"
        )
    if (wrong := wrong_images(request, answer)) is not None:
        raise EngineResponseError(f"the engine's response to a turn is wrong: {wrong}")
    return answer


@functools.lru_cache(maxsize=8)
def _policy_at(url: str, loop: asyncio.AbstractEventLoop, extra: tuple[tuple[str, Any], ...]) -> EnginePolicy:
    return EnginePolicy(url, extra=dict(extra))


def engines_url(args: PluginArgs) -> str:
    if args.sglang_router_ip is None:
        raise RuntimeError("no engine serves this run (router address is not set): it has no policy")
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def policy_of(args: PluginArgs) -> EnginePolicy:
    """Return the policy of the run that calls a generate function; one for each event loop."""
    extra: tuple[tuple[str, Any], ...] = ()
    if args.lora_sync == "adapter":
        extra += (("lora_path", ADAPTER_NAME),)
    if args.use_rollout_routing_replay and is_trained():
        extra += (("return_routed_experts", True),)
    return _policy_at(engines_url(args), asyncio.get_running_loop(), extra)
