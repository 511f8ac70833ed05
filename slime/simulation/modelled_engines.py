"""Modelled engines: respond to requests like real engines, after times from a cost model.

Requests reach them through the same client, balancing rule and retries as real engines. One simulated token
may represent many (`unit`): lengths are then in units, costs in real tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.arguments import RunInfo
from slime.simulation.clock import Clock
from slime.simulation.costs import EngineCosts
from slime.simulation.workload import LengthModel
from slime.utils.http_utils import HttpError
from slime.weight_sync.base import WeightBundle

ROUTER = "http://modelled-router:1"
VOCABULARY = 1 << 17
_TOKEN = 7  # every token of a modelled response
_REFRESH_TOKENS = 256  # a decode rate is used for this long although caches grow
_ABORT_S = 1e-3  # from an abort until the engine has ended the request


@dataclass(eq=False, slots=True)
class _Request:
    number: int
    rid: str
    sample: str
    prompt: float  # tokens, including those generated before
    length: float  # tokens to make
    cut: bool  # the budget ends it
    answer: asyncio.Future[dict[str, Any]]
    began: float = 0.0  # progress of the engine when the request was admitted
    marks: list[tuple[str, float]] = field(default_factory=list)  # (version, first token with it)
    running: bool = False


class ModelledEngine:
    """Models continuous batching as a fluid: running requests advance at one rate, set by their number."""

    def __init__(
        self,
        clock: Clock,
        costs: EngineCosts,
        lengths: LengthModel,
        name: str,
        unit: int,
        left: dict[str, float],
    ):
        self._clock, self._costs, self._lengths, self._unit = clock, costs, lengths, unit
        self._left = left  # sample -> tokens that an aborted one keeps; shared by all engines
        self.url = f"http://{name}:1"
        self.version = "default"
        self.alive = True
        self.busy_s = self.tokens = self.running_s = 0.0  # running_s: requests x seconds
        self._paused = False
        self._numbers = itertools.count()
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._ends: list[tuple[float, int]] = []
        self._progress = self._debt_s = self._cached = 0.0
        self._token_s, self._at = 1.0, clock.now
        self._timer: asyncio.TimerHandle | None = None
        self._aborted: list[_Request] = []

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    # -- requests

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if not self.alive:
            raise ConnectionRefusedError(f"{self.url} is down")
        params, prompt = payload["sampling_params"], len(payload["input_ids"]) * self._unit
        rid = str(payload.get("rid"))
        sample = rid.rpartition(".")[2].partition("-")[0]
        length = self._left.pop(sample, None)
        if length is None or payload["input_ids"][-1] != _TOKEN:  # a new response
            length = self._lengths.answer(int(params.get("sampling_seed") or next(self._numbers)))
        budget = params["max_new_tokens"] * self._unit
        request = _Request(
            number=next(self._numbers),
            rid=rid,
            sample=sample,
            prompt=prompt,
            length=min(length, budget),
            cut=length > budget,
            answer=self._clock.loop.create_future(),
        )
        self._waiting.append(request)
        self._change()
        try:
            return await request.answer
        except asyncio.CancelledError:  # the connection is gone
            self._drop(request)
            self._change()
            raise

    def abort(self, rid: str, *, prefix: bool) -> None:
        """Abort all requests at once, in order of arrival: ids are random, so their order must not matter."""
        for request in (*self._running.values(), *self._waiting):
            if request.rid == rid or (prefix and request.rid.startswith(rid)):
                if not self._aborted:
                    self._clock.at(self._clock.now + _ABORT_S, self._end_aborted)
                self._aborted.append(request)

    def _end_aborted(self) -> None:
        self._advance()
        aborted, self._aborted = self._aborted, []
        for request in sorted(aborted, key=lambda r: r.number):
            self._end(request, "abort")
        self._change()

    def _end(self, request: _Request, how: str) -> None:
        made = min(request.length, self._progress - request.began) if request.running else 0.0
        self._drop(request)
        if request.answer.done():
            return
        if how == "abort":
            self._left[request.sample] = max(request.length - made, float(self._unit))
        count = int(made // self._unit) if how == "abort" else max(1, round(request.length / self._unit))
        request.answer.set_result(self._answer(request, count, how))

    def _answer(self, request: _Request, count: int, how: str) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": how, "matched": _TOKEN} if how == "stop" else {"type": how}
        starts = [min(count, round(first / self._unit)) for _, first in request.marks] + [count]
        spans = [
            {"version": version, "start": start, "end": end}
            for (version, _), start, end in zip(request.marks, starts, starts[1:], strict=False)
            if end > start
        ]
        return {
            "text": "",
            "output_ids": [_TOKEN] * count,
            "meta_info": {
                "id": request.rid,
                "finish_reason": finish,
                "output_token_logprobs": [(-1.0, _TOKEN, None)] * count,
                "weight_version": self.version,
                "weight_versions": spans,
                "prompt_tokens": int(request.prompt / self._unit),
                "cached_tokens": 0,
                "completion_tokens": count,
            },
        }

    def _drop(self, request: _Request) -> None:
        if request.running:
            self._running.pop(request.number, None)
            request.running = False
            self._cached -= request.prompt + (self._progress - request.began)
        elif request in self._waiting:
            self._waiting.remove(request)

    # -- the passage of time

    def _advance(self) -> None:
        now = self._clock.now
        passed, self._at = now - self._at, now
        if not self._running or self._paused or passed <= 0:
            return
        self.busy_s += passed
        self.running_s += passed * len(self._running)
        paid = min(self._debt_s, passed)
        self._debt_s -= paid
        made = (passed - paid) / self._token_s
        self._progress += made
        self._cached += made * len(self._running)
        self.tokens += made * len(self._running)

    def _change(self) -> None:
        """Admit waiting requests that fit, and schedule the next end of a request."""
        self._advance()
        if self.alive and not self._paused:
            while self._waiting and len(self._running) < self._costs.max_running:
                self._admit(self._waiting.popleft())
        if self._timer is not None:
            self._timer.cancel()
        if not self._running or self._paused or not self.alive:
            return
        self._token_s = self._costs.decode_s(len(self._running), self._cached)
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        tokens = min(_REFRESH_TOKENS, max(0.0, self._ends[0][0] - self._progress))
        self._timer = self._clock.at(self._clock.now + self._debt_s + tokens * self._token_s, self._due)

    def _admit(self, request: _Request) -> None:
        request.began, request.running = self._progress, True
        request.marks = [(self.version, 0.0)]
        self._running[request.number] = request
        heapq.heappush(self._ends, (self._progress + request.length, request.number))
        self._cached += request.prompt
        self._debt_s += self._costs.prefill_s(request.prompt)

    def _due(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._progress + 1e-6:
            _, number = heapq.heappop(self._ends)
            request = self._running.get(number)
            if request is not None:
                self._end(request, "length" if request.cut else "stop")
        self._change()

    # -- weights, faults

    def pause(self) -> None:
        self._advance()
        self._paused = True
        self._change()

    def resume(self, version: str) -> None:
        """Resume waiting requests with the new weights; their KV caches are computed again."""
        self._at = self._clock.now
        self._paused, self.version = False, version
        for request in self._running.values():
            request.marks.append((version, self._progress - request.began))
        self._debt_s += self._costs.prefill_s(max(0.0, self._cached))
        self._change()

    def die(self) -> None:
        self._advance()
        self.alive = False
        lost = [*self._running.values(), *self._waiting]
        self._running, self._ends, self._aborted = {}, [], []
        self._waiting.clear()
        self._cached = self._debt_s = 0.0
        for request in lost:
            request.running = False
            if not request.answer.done():
                request.answer.set_exception(ConnectionResetError(f"{self.url} died"))
        self._change()

    def wake(self, version: str) -> None:
        self._at = self._clock.now
        self.alive, self._paused, self.version = True, False, version


class ModelledFleet:
    """Modelled engines, their load balancer (fewest requests, sticky sessions) and their weights.

    It replaces `EnginePlane` and `EngineWeights`: the rollout manager, the residency and the weight push call
    it in the same way.
    """

    def __init__(self, clock: Clock, engines: Sequence[ModelledEngine], push_s: float, swap_s: float):
        self._clock, self.engines, self._push_s, self._swap_s = clock, list(engines), push_s, swap_s
        self._bundle: WeightBundle | None = None
        self.pushing = False
        self.servers = {ROUTER: self._route} | {engine.url: self._serve(engine) for engine in engines}

    # as `EnginePlane`

    transports = ("disk",)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self.engines)

    @property
    def weights(self) -> ModelledFleet:
        return self

    def connect(self, info: RunInfo) -> RunInfo:
        values = vars(info) | {
            "sglang_router_ip": "modelled-router",
            "sglang_router_port": 1,
            "engine_urls": self.urls,
            "rollout_num_engines": len(self.engines),
            "vocab_size": VOCABULARY,
            "max_context_len": 1 << 40,
        }
        return RunInfo(**values)

    def guard(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    def forward_seconds(self) -> float:
        return max(engine.busy_s for engine in self.engines)

    # as `EngineWeights`

    @property
    def version(self) -> str | None:
        return self._bundle.version if self._bundle is not None else None

    async def receive(self, bundle: WeightBundle) -> dict[str, float]:
        self._bundle, self.pushing = bundle, True
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self._push_s)
        self.pushing = False
        for engine in self.engines:
            if engine.alive:
                engine.resume(bundle.version)
        return {"perf/engines_evicted": float(sum(not engine.alive for engine in self.engines))}

    async def release(self, tags: object) -> None:
        await asyncio.sleep(self._swap_s / 2)

    restore = release

    # requests to servers

    async def _route(self, method: str, path: str, payload: Any, headers: Mapping[str, str]) -> Any:
        if path == "workers":
            return {"workers": [{"url": engine.url} for engine in self.engines if engine.alive]}
        alive = [engine for engine in self.engines if engine.alive]
        if not alive:
            raise HttpError(503, "no engine is in rotation", ROUTER)
        if payload.get("stream"):  # refuse a whole group: its members are then sent alone
            raise HttpError(400, "modelled engines stream nothing", ROUTER)
        return await min(alive, key=lambda engine: engine.load).generate(payload)

    def _serve(self, engine: ModelledEngine) -> Any:
        async def serve(method: str, path: str, payload: Any, headers: Mapping[str, str]) -> Any:
            if not engine.alive:
                raise ConnectionRefusedError(f"{engine.url} is down")
            if path == "abort_request":
                engine.abort(payload["rid"], prefix=payload.get("prefix", False))
                return None
            if path in ("model_info", "server_info"):
                return {"weight_version": engine.version}
            if path.startswith("v1/loads"):
                return {"loads": [{"num_running_reqs": engine.load, "num_waiting_reqs": 0}]}
            raise HttpError(404, f"a modelled engine has no {path}", engine.url)

        return serve

    # faults

    def die(self, number: int, restart_s: float) -> None:
        engine = self.engines[number % len(self.engines)]
        if engine.alive:
            engine.die()
            self._clock.at(self._clock.now + restart_s, self._wake, engine)

    def _wake(self, engine: ModelledEngine) -> None:
        """Bring an engine back with the current weights; during a push, when the push is over."""
        if self.pushing:
            self._clock.at(self._clock.now + 1.0, self._wake, engine)
        else:
            engine.wake(self.version or "default")
