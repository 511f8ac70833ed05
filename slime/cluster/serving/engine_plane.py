"""All models that a run serves: the policy, which gets the trainer's weights, and frozen ones beside it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from slime.arguments import Args, RunInfo
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.served_model import ModelService, make_servers, ranks_on_engines
from slime.runtime.base import Runtime, in_background
from slime.runtime.placement import Placement
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError
from slime.utils.machine.run_identity import Run
from slime.utils.processing_utils import load_tokenizer
from slime.wire.control import EngineControl, EngineCounters
from slime.wire.protocol import EngineInfo

R = TypeVar("R")


class EnginePlane:
    """Engines start when this is made; `connect` waits for them."""

    def __init__(self, args: Args, run_: Run, placement: Placement, runtime: Runtime):
        self._args, self._run = args, run_
        self._told: list[EngineCounters] = []
        policy, servers = args.engine_topology.policy, make_servers(args, run_, placement.engines, runtime)
        engines = servers.pop(policy.name, [])
        reserved = args.eval_num_engines if engines else 0
        self._policy = ModelService(args, policy, engines, reserved)
        self._fleet = self._policy.fleet
        self.weights = EngineWeights(args, run_.shm_prefix, ranks_on_engines(args, placement), self._fleet)
        models = {model.name: model for model in args.engine_topology.models}
        # With the weights they were loaded with: teachers, reward models.
        self._frozen = [ModelService(args, models[name], found) for name, found in servers.items()]
        for service in self._services:
            service.fleet.launch()

    @property
    def _services(self) -> list[ModelService]:
        return [self._policy, *self._frozen]

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all engines of the policy; empty where the run has none."""
        return self._fleet.urls

    def connect(self, info: RunInfo) -> RunInfo:
        """Waits for every engine; returns the facts of the run with their addresses and limits."""
        if not self.urls:
            return info
        # While engines start: the default rollout needs it, and a folder that is no model fails early.
        load_tokenizer(self._args.hf_checkpoint)
        self._fleet.wait_ready()
        infos = [self._ask(url) for url in self.urls]
        endpoint, evaluation = self._policy.start_routers(self._run)
        routers = {self._policy.model.name: endpoint}
        if evaluation is not None:
            routers[EVALUATION_ENGINES] = evaluation
        for service in self._frozen:
            service.fleet.wait_ready()
            routers[service.model.name] = service.start_routers(self._run)[0]
        return _with_model_facts(
            replace(
                info,
                router_ip=endpoint[0],
                router_port=endpoint[1],
                model_routers=routers,
                engine_urls=self._policy.urls,
                num_engines=len(self._policy.urls),
            ),
            self._args.hf_checkpoint,
            infos,
        )

    def _ask(self, url: str) -> EngineInfo:
        """What an engine that has just come up says of itself. RunStopped: it is gone before it served."""
        try:
            return self.weights.info(url)
        except HttpError as error:
            raise RunStopped(
                f"an engine was lost as soon as it had started: {error}; its log is in "
                f"{self._run.run_dir}/logs."
            ) from error

    @property
    def transports(self) -> tuple[str, ...]:
        """Ways to bring weights in that every engine of the policy offers."""
        offered = [set(server.transports(self._ask(server.url))) for server in self._fleet.servers]
        return tuple(set.intersection(*offered)) if offered else ()

    def guard(self, work: Callable[[], R]) -> R:
        """Runs rollout code, but ends at once with the cause when the engines are given up."""
        future = in_background(work, "rollout")
        failures = [failure for service in self._services for failure in service.failures]
        awaited: list[concurrent.futures.Future[Any]] = [future, *failures]
        done, _ = concurrent.futures.wait(awaited, return_when=concurrent.futures.FIRST_COMPLETED)
        for failure in failures:
            if failure in done:
                failure.result()
        return future.result()

    def forward_seconds(self) -> float:
        """The time that the busiest engine has spent in forward passes; 0 where engines do not count it.

        It begins anew with an engine that is started again.
        """
        answers = self._ask_each(EngineControl.counters)
        self._told = [answer for answer in answers if isinstance(answer, EngineCounters)]
        return max((told.forward_s for told in self._told if told.forward_s is not None), default=0.0)

    def requests_of_others(self) -> tuple[int, str | None] | None:
        """Requests that another client than slime's sent with other sampling: how many, and what differs; as
        engines said when they were last asked for their forward seconds.
        """
        found = [told for told in self._told if told.num_bent]
        return (sum(told.num_bent for told in found), found[0].why_bent) if found else None

    def _ask_each(
        self, question: Callable[[EngineControl], Coroutine[Any, Any, R]]
    ) -> list[R | BaseException]:
        async def ask(urls: list[str]) -> list[R | BaseException]:
            questions = [question(EngineControl(url)) for url in urls]
            return await asyncio.gather(*questions, return_exceptions=True)

        with self._fleet.frozen() as urls:
            return run(ask(urls))

    def dump_stacks(self) -> None:
        for service in self._services:
            service.fleet.dump_stacks()

    def close(self) -> None:
        for service in self._services:
            service.close()


def _with_model_facts(info: RunInfo, hf_checkpoint: str | None, infos: list[EngineInfo]) -> RunInfo:
    """Limits of all engines; what one does not say about itself follows from the model's config."""
    config = _text_config(hf_checkpoint)
    return replace(
        info,
        vocab_size=min(engine.vocab_size or config.vocab_size for engine in infos),
        max_context_len=min(engine.context_len or config.max_position_embeddings for engine in infos),
        num_layers=getattr(config, "num_hidden_layers", None),
        moe_router_topk=getattr(config, "num_experts_per_tok", None),
    )


def _text_config(hf_checkpoint: str | None) -> Any:
    # Heavy import, and some runs have no engines.
    from transformers import AutoConfig, PretrainedConfig

    try:
        return AutoConfig.from_pretrained(hf_checkpoint).get_text_config()
    except ValueError:
        # A model type that engine and trainer know and transformers does not (MiMo):
        # its sizes stand in the file all the same.
        return PretrainedConfig.from_pretrained(hf_checkpoint).get_text_config()
