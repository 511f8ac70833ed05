"""Serves all models of a run: the policy, which receives the trainer's weights, and frozen models."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slime.arguments import Args, RunInfo
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.catalog.deadlines import timeout_s
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.served_model import ModelService, make_servers, ranks_on_engines
from slime.engines.balancer import Address, Balancer
from slime.engines.external import ExternalServer, discover, read_address
from slime.runtime.base import P, R, Runtime
from slime.runtime.placement import Placement
from slime.utils.async_utils import in_background, run
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError
from slime.utils.machine.run_identity import Run
from slime.utils.processing_utils import load_tokenizer
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo


class EnginePlane:
    """All engines of a run. The constructor starts them; `connect` waits until they are ready."""

    def __init__(self, args: Args, run_: Run, placement: Placement, runtime: Runtime):
        self._args, self._run = args, run_
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
        """Return the addresses of all engines of the policy; empty if the run has none."""
        return self._fleet.urls

    @property
    def balancers(self) -> dict[Address, Balancer]:
        """Return the load balancers of this process by their addresses."""
        return {at: one for service in self._services for at, one in service.balancers.items()}

    def connect(self, info: RunInfo) -> RunInfo:
        """Wait for every engine; return the facts of the run with their addresses and limits."""
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
                sglang_router_ip=endpoint[0],
                sglang_router_port=endpoint[1],
                sglang_model_routers=routers,
                engine_urls=self._policy.urls,
                rollout_num_engines=len(self._policy.urls),
            ),
            self._args.hf_checkpoint,
            infos,
        )

    def _ask(self, url: str) -> EngineInfo:
        """Ask an engine that has just started what it is. RunStopped: it is gone already."""
        try:
            return self.weights.info(url)
        except HttpError as error:
            raise RunStopped(
                f"an engine was lost as soon as it had started: {error}; its log is in "
                f"{self._run.run_dir}/logs."
            ) from error

    def add_engine(self, address: str, transport: str | None) -> str:
        """Let an engine of somebody else join, and return its address. ValueError: it cannot be used."""
        url = read_address(address, "add_engine")
        if url in self._fleet.urls:
            raise ValueError(f"{url} is an engine of this run already")
        self._run.engine_token.use_for(url)
        [engine] = discover([address], self._args.hf_checkpoint, "add_engine")
        server = ExternalServer(engine, timeout_s(self._args, "engine-start"))
        ours, info = self._ask(self.urls[0]), engine.info
        if info.dialect is not ours.dialect or engine.worker_type != "regular":
            kinds = f"{info.dialect.name} ({engine.worker_type}), the run's are {ours.dialect.name} (regular)"
            raise ValueError(f"{url} is of another kind than the engines of this run: {kinds}")
        if transport is not None and transport not in server.transports(info):
            raise ValueError(f"{url} cannot take weights by the transport {transport}, which this run uses")
        self._policy.add_engine(server)
        return url

    def remove_engine(self, address: str) -> str:
        """Let an engine leave, and return its address. ValueError: there is no such engine, or no other."""
        url = read_address(address, "remove_engine")
        self._policy.remove_engine(url)
        return url

    def is_serving(self, url: str) -> bool:
        """Return whether an engine serves; one that has just joined may wait for weights."""
        return self._fleet.is_alive(url)

    @property
    def engines_that_generate(self) -> tuple[str, ...]:
        return self._policy.urls

    @property
    def transports(self) -> tuple[str, ...]:
        """Return the weight transports that every engine of the policy offers."""
        offered = [set(server.transports(self._ask(server.url))) for server in self._fleet.servers]
        return tuple(set.intersection(*offered)) if offered else ()

    def guard(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `work(...)`, but raise the cause at once when the engines are given up."""
        future = in_background(functools.partial(work, *args, **kwargs), "rollout")
        failures = [failure for service in self._services for failure in service.failures]
        awaited: list[concurrent.futures.Future[Any]] = [future, *failures]
        done, _ = concurrent.futures.wait(awaited, return_when=concurrent.futures.FIRST_COMPLETED)
        for failure in failures:
            if failure in done:
                failure.result()
        return future.result()

    def forward_seconds(self) -> float:
        """Return the time that the busiest engine has spent in forward passes since it was started.

        It is 0 where engines do not count it.
        """

        async def ask(urls: list[str]) -> list[float | BaseException | None]:
            asked = [EngineControl(url).forward_seconds() for url in urls]
            return await asyncio.gather(*asked, return_exceptions=True)

        with self._fleet.frozen() as urls:
            answers = run(ask(urls))
        return max((answer for answer in answers if isinstance(answer, float)), default=0.0)

    def close(self) -> None:
        for service in self._services:
            service.close()


def _with_model_facts(info: RunInfo, hf_checkpoint: str | None, infos: list[EngineInfo]) -> RunInfo:
    """Add the limits of all engines; what one does not report follows from the model's config."""
    # Heavy import, and some runs have no engines.
    from transformers import AutoConfig, PretrainedConfig

    try:
        config: Any = AutoConfig.from_pretrained(hf_checkpoint).get_text_config()
    except ValueError:  # a model type that engine and trainer know and transformers does not (MiMo)
        config = PretrainedConfig.from_pretrained(hf_checkpoint).get_text_config()
    return replace(
        info,
        vocab_size=min(engine.vocab_size or config.vocab_size for engine in infos),
        max_context_len=min(engine.context_len or config.max_position_embeddings for engine in infos),
        num_layers=getattr(config, "num_hidden_layers", None),
        moe_router_topk=getattr(config, "num_experts_per_tok", None),
    )
