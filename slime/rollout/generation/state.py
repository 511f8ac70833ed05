"""What the generate functions of one run share, and where the engines of the running task are."""

import asyncio
import weakref
from typing import Any, TypeVar

from slime.arguments import PluginArgs
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.rollout.generation.concurrency import Limit, TokenLimit, make_limit, tokens_of
from slime.rollout.generation.generate_request import sampling_params_of
from slime.rollout.generation.per_args import OnePerArgs
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.utils import waits
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, Generation

_PAUSE_BETWEEN_ATTEMPTS_S = 2.5  # at least, once the back-off has grown

T = TypeVar("T")
_PerLoop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, T]]


class GenerateState(metaclass=OnePerArgs):
    """What the generate functions of one run share: tokenizer, sampling parameters, the cap on requests."""

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
        """How many requests the engines that the current task asks may have in flight."""
        if self.scope.engines == EVALUATION_ENGINES:
            return self.args.sglang_server_concurrency * self.args.eval_num_engines
        return self.args.sglang_server_concurrency * max(1, self.args.rollout_num_engines)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """A fresh dict each time: what one caller changes, no other sees."""
        return sampling_params_of(self.args)

    @property
    def semaphore(self) -> Limit:
        """The running loop's cap on samples being generated; `async with state.semaphore`."""
        held = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        engines = self.scope.engines
        if engines not in held:
            reserved = engines == EVALUATION_ENGINES  # nobody else loads these, so their number does not move
            held[engines] = Limit(self.max_running) if reserved else make_limit(self.args, self.max_running)
        return held[engines]

    @property
    def client(self) -> EngineClient:
        held = self._clients.setdefault(asyncio.get_running_loop(), {})
        engines = self.scope.engines
        if engines not in held:
            url = get_model_url(self.args, "default", endpoint="")
            # Attempts outlast the wait for an engine: whoever watches the engines ends the run and knows why.
            attempts = max(60, int(self.args.no_engine_timeout_s / _PAUSE_BETWEEN_ATTEMPTS_S))
            held[engines] = EngineClient(
                url,
                timeout_s=self.args.generate_timeout_s,
                max_retries=attempts,
                max_running=self.max_running,
            )
        return held[engines]

    @property
    def scope(self) -> RequestScope:
        """The requests of the rollout or evaluation this task belongs to."""
        return current_scope() or self._no_scope

    @property
    def aborted(self) -> bool:
        return self.scope.aborted

    def reset(self) -> None:
        self._no_scope = RequestScope(self.args.rollout_max_context_len)

    async def send(self, request: GenerateRequest) -> Generation:
        async with self.tokens_in_flight.holding(tokens_of(request)):
            with self.scope.sending(request.rid) as made:
                answer = await self.client.generate(request)
                made(len(answer.ids) if is_trained() else 0)
                return answer

    def engine_of(self, answer: Generation) -> dict[str, str]:
        """Its name, for whoever asks when which engine was busy; empty: a router does not tell."""
        url = str(answer.meta.get("answered_by") or self.client.base_url)
        name = waits.known_as(url)
        return {"engine": name} if name not in (url, "router") else {}

    @property
    def tokens_in_flight(self) -> TokenLimit:
        """The running loop's cap on the tokens that requests hold at the engines (--max-tokens-in-flight)."""
        held = self._token_limits.setdefault(asyncio.get_running_loop(), {})
        return held.setdefault(self.scope.engines, TokenLimit(self.args.max_tokens_in_flight))


def get_model_url(args: PluginArgs, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Where requests for a model go: its own router where a topology serves several models, else the run's.

    Within an evaluation "default" is the engines that are kept for it, if there are any.
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
