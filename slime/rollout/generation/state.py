"""The state that generate functions of one run share: client, limits on requests, engine addresses."""

import asyncio
import collections
import contextlib
import functools
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from slime.arguments import PluginArgs, with_defaults
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.catalog.deadlines import timeout_s
from slime.liveness import waits
from slime.rollout.generation.generate_request import sampling_params_of
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, Generation

_PAUSE_BETWEEN_ATTEMPTS_S = 2.5  # at least, once the back-off has grown


class Limit:
    """A first-in, first-out semaphore of which a caller may take several slots at once.

    A count above the limit waits until nothing else is in use.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.in_use = 0
        self._waiters: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def __aenter__(self) -> None:
        await self.enter(1)

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    async def enter(self, count: int) -> None:
        """Take `count` slots, all or none; each is returned by `leave`."""
        if not self._waiters and self._fits(count):
            self.in_use += count
            return
        entry = (count, asyncio.get_running_loop().create_future())
        self._waiters.append(entry)
        try:
            await entry[1]  # whoever wakes it has counted its slots
        except asyncio.CancelledError:
            if entry[1].cancelled():
                with contextlib.suppress(ValueError):  # `_wake` has removed it already
                    self._waiters.remove(entry)
                self._wake()  # later ones may need fewer
            else:  # the slots were ours already
                self.leave(count)
            raise

    def leave(self, count: int = 1) -> None:
        self.in_use -= count
        self._wake()

    def _fits(self, count: int) -> bool:
        return self.in_use == 0 or self.in_use + count <= self.limit

    def _wake(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            count, future = self._waiters.popleft()
            if not future.done():
                self.in_use += count
                future.set_result(None)


class OnePerArgs(type):
    """A metaclass: `Kind(args)` returns the same object for the same args. The last few are remembered."""

    def __init__(cls, *definition: Any) -> None:
        super().__init__(*definition)
        cls._made: list[tuple[Any, Any]] = []

    def __call__(cls, args: PluginArgs) -> Any:
        for known, made in cls._made:
            if known is args:
                return made
        made = super().__call__(with_defaults(args))
        cls._made.append((args, made))
        del cls._made[:-4]
        return made


class GenerateState(metaclass=OnePerArgs):
    """The tokenizer, sampling parameters, client and cap on requests that generate functions share."""

    def __init__(self, args: PluginArgs) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        shows = args.multimodal_keys or any(data.multimodal_keys for data in args.eval_datasets)
        self.processor = load_processor(args.hf_checkpoint) if shows else None
        self._no_scope = RequestScope(args.rollout_max_context_len)
        self._access: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Access]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def access(self) -> "_Access":
        """Return how the running loop reaches the engines of the current task."""
        loop, engines = asyncio.get_running_loop(), self.scope.engines
        held = self._access.get(loop)
        if held is None:
            held = self._access[loop] = {}
        if engines not in held or held[engines].is_outdated:
            held[engines] = _Access(self.args, engines)
        return held[engines]

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Return a new dict each time, which the caller may change."""
        return sampling_params_of(self.args)

    @property
    def semaphore(self) -> Limit:
        """Return the running loop's cap on samples being generated; use `async with state.semaphore`."""
        return self.access.samples

    @property
    def client(self) -> EngineClient:
        return self.access.client

    @property
    def scope(self) -> RequestScope:
        """Return the requests of the rollout or evaluation that this task belongs to."""
        return current_scope() or self._no_scope

    @property
    def aborted(self) -> bool:
        return self.scope.aborted

    def reset(self) -> None:
        self._no_scope = RequestScope(self.args.rollout_max_context_len)

    @contextlib.asynccontextmanager
    async def sending(self, request: GenerateRequest) -> AsyncIterator[Callable[[int], None]]:
        """Register a request while it is in flight; call what this yields with its number of tokens."""
        cap = self.access.tokens
        tokens = len(request.input_ids or ()) + (request.sampling.max_new_tokens or 0)  # in a KV cache
        if cap is not None:
            await cap.enter(tokens)
        try:
            with self.scope.sending(request.rid) as note_tokens:
                yield lambda number: note_tokens(number if is_trained() else 0)
        finally:
            if cap is not None:
                cap.leave(tokens)

    def engine_of(self, answer: Generation) -> dict[str, str]:
        """Return the name of the engine that responded; empty if a router does not report it."""
        url = str(answer.meta.get("answered_by") or self.client.base_url)
        name = waits.known_as(url)
        return {"engine": name} if name not in (url, "router") else {}


class _Access:
    """A client and the limits of one event loop for one set of engines; they belong to the loop."""

    def __init__(self, args: PluginArgs, engines: str) -> None:
        reserved = engines == EVALUATION_ENGINES
        num_engines = args.eval_num_engines if reserved else max(1, args.rollout_num_engines)
        most = args.sglang_server_concurrency * num_engines
        self._num_engines = None if reserved else args.rollout_num_engines
        self.samples = Limit(most)
        cap = args.max_tokens_in_flight
        self.tokens = None if cap is None else Limit(cap)
        self._args, self._max_running = args, most

    @property
    def is_outdated(self) -> bool:
        """Return whether engines have joined or left, so that more or fewer requests are wanted."""
        return self._num_engines not in (None, self._args.rollout_num_engines)

    @functools.cached_property
    def client(self) -> EngineClient:
        # Retries outlast the wait for an engine: the fleet ends the run first, with the cause.
        attempts = max(60, int(timeout_s(self._args, "no-engine") / _PAUSE_BETWEEN_ATTEMPTS_S))
        return EngineClient(
            get_model_url(self._args, "default", endpoint=""),
            timeout_s=timeout_s(self._args, "generate"),
            max_retries=attempts,
            max_running=self._max_running,
        )


def get_model_url(args: PluginArgs, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Return the URL for requests to a model: its own router if several models are served, else the run's.

    In an evaluation "default" means the engines reserved for evaluation, if there are any.
    """
    # A namespace that a test or a script made itself may lack it.
    routers = vars(args).get("sglang_model_routers") or {}
    scope = current_scope()
    if model_name == "default" and scope is not None:
        model_name = scope.engines
    if model_name in routers:
        ip, port = routers[model_name]
    elif routers and model_name not in ("default", "actor"):
        raise ValueError(f"no model {model_name!r} is served; there are {sorted(routers)}.")
    else:
        ip, port = args.sglang_router_ip, args.sglang_router_port
    if ip is None:
        raise RuntimeError("no engine serves this run (router address is not set).")
    return f"http://{ip}:{port}{endpoint}"
