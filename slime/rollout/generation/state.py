"""The state that generate functions of one run share, and the address of the engines."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from slime.arguments import PluginArgs, with_defaults
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.catalog.deadlines import timeout_s
from slime.liveness import waits
from slime.rollout.generation.concurrency import Limit, TokenLimit, make_limit, tokens_of
from slime.rollout.generation.generate_request import sampling_params_of
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, Generation

_PAUSE_BETWEEN_ATTEMPTS_S = 2.5  # at least, once the back-off has grown

T = TypeVar("T")
_PerLoop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, T]]


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
        # Semaphores and clients belong to the loop that waits on them: one of each per set of engines.
        self._semaphores: _PerLoop[Limit] = weakref.WeakKeyDictionary()
        self._clients: _PerLoop[EngineClient] = weakref.WeakKeyDictionary()
        self._token_limits: _PerLoop[TokenLimit] = weakref.WeakKeyDictionary()

    @property
    def max_running(self) -> int:
        """Return how many requests may be in flight at the engines of the current task."""
        if self.scope.engines == EVALUATION_ENGINES:
            return self.args.sglang_server_concurrency * self.args.eval_num_engines
        return self.args.sglang_server_concurrency * max(1, self.args.rollout_num_engines)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Return a new dict each time, which the caller may change."""
        return sampling_params_of(self.args)

    @property
    def semaphore(self) -> Limit:
        """Return the running loop's cap on samples being generated; use `async with state.semaphore`."""
        held = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        engines = self.scope.engines
        if engines not in held:
            reserved = engines == EVALUATION_ENGINES  # no other client loads these, so the limit stays fixed
            held[engines] = Limit(self.max_running) if reserved else make_limit(self.args, self.max_running)
        return held[engines]

    @property
    def client(self) -> EngineClient:
        held = self._clients.setdefault(asyncio.get_running_loop(), {})
        engines = self.scope.engines
        if engines not in held:
            url = get_model_url(self.args, "default", endpoint="")
            # Retries outlast the wait for an engine: the fleet ends the run first, with the cause.
            attempts = max(60, int(timeout_s(self.args, "no-engine") / _PAUSE_BETWEEN_ATTEMPTS_S))
            held[engines] = EngineClient(
                url,
                timeout_s=timeout_s(self.args, "generate"),
                max_retries=attempts,
                max_running=self.max_running,
            )
        return held[engines]

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
        async with self.tokens_in_flight.holding(tokens_of(request)):
            with self.scope.sending(request.rid) as note_tokens:
                yield lambda number: note_tokens(number if is_trained() else 0)

    def engine_of(self, answer: Generation) -> dict[str, str]:
        """Return the name of the engine that responded; empty if a router does not report it."""
        url = str(answer.meta.get("answered_by") or self.client.base_url)
        name = waits.known_as(url)
        return {"engine": name} if name not in (url, "router") else {}

    @property
    def tokens_in_flight(self) -> TokenLimit:
        """Return the running loop's cap on tokens at the engines (--max-tokens-in-flight)."""
        held = self._token_limits.setdefault(asyncio.get_running_loop(), {})
        return held.setdefault(self.scope.engines, TokenLimit(self.args.max_tokens_in_flight))


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
        raise RuntimeError(
            "no engine serves this run (router address is not set): generation is not possible."
        )
    return f"http://{ip}:{port}{endpoint}"
