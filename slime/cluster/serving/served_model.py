"""Serves one model: starts its engines, keeps them alive in a fleet, and puts a load balancer in front."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slime.arguments import Args, RunInfo, plugin_args
from slime.arguments.groups.topology import ServedModel
from slime.arguments.passthrough.router_flags import need_router_python
from slime.catalog.deadlines import timeout_s
from slime.catalog.engines import ENGINES
from slime.catalog.limits import limit
from slime.catalog.quantizations import QUANTIZATIONS
from slime.cluster.serving.engine_host import HostedEngine
from slime.engines.balancer import Address, Balancer, make_balancer
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.external import ExternalServer, discover, read_address
from slime.engines.fleet import EngineFleet, FleetServer, Rotation, WatchPolicy
from slime.engines.launch_plan import EngineSite, RouterPlan, place_engines, plan_router
from slime.engines.sglang.router import ExternalRouter, SGLangRouter, router_command
from slime.runtime.base import Runtime, WorkerSpec
from slime.runtime.placement import Placement, Slot, by_engine, cores_each
from slime.utils.async_utils import run
from slime.utils.http_utils import token_of
from slime.utils.machine.children import import_environment, thread_environment
from slime.utils.machine.run_identity import LOOPBACK, Run
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

_RESTART_WINDOW_S = 600.0  # --limits engine-restarts counts the deaths of this long


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a model. `port`: for requests; `front`: the load balancer, None for a single engine."""

    servers: tuple[FleetServer, ...]
    port: int
    front: SGLangRouter | ExternalRouter | Balancer | None = None
    host: str = LOOPBACK


def open_endpoint(
    args: Args, run_: Run, plan: RouterPlan, servers: tuple[FleetServer, ...], name: str, port: int | None
) -> Endpoint:
    """Starts what stands before engines that serve. `name` is that of its log, `port` the one asked for."""
    if plan.kind == "sglang" or any(server.plan.worker_type != "regular" for server in servers):
        python = need_router_python("--rollout-router sglang")
        timeout = ("--request-timeout-secs", str(round(timeout_s(args, "router-request"))))
        process = LaunchPlan(
            name=name,
            command=router_command(python, "cache_aware", (*timeout, *plan.words, *args.router_options)),
            env={},
            log_path=run_.run_dir / "logs" / f"{name}.log",
            start_timeout_s=timeout_s(args, "engine-start"),
        )
        policy = WatchPolicy(
            limit(args, "engine-restarts"),
            _RESTART_WINDOW_S,
            silence_limit_s=timeout_s(args, "engine-silence") or None,
        )
        router = SGLangRouter(process, policy, port=port or 0)
        for server in servers:
            router.enroll(server)
        return Endpoint(servers, router.start(), router)
    asked = port is not None or args.router_middleware_paths
    # An engine that asks for a token cannot be asked directly by code that has none: the balancer adds it.
    here = servers[0].url.startswith(f"http://{LOOPBACK}:") and token_of(servers[0].url) is None
    if len(servers) == 1 and not asked and here:
        return Endpoint(servers, int(servers[0].url.rpartition(":")[2]))
    seen = plugin_args(args, RunInfo(run_.run_id, str(run_.run_dir)))
    balancer = make_balancer(args, seen, [server.url for server in servers])
    return Endpoint(servers, run(balancer.start(port=port or 0)), balancer)


def join_router(args: Args, servers: tuple[FleetServer, ...]) -> Endpoint:
    """Tell the router of --sglang-router-ip which engines serve."""
    assert args.sglang_router_ip is not None and args.sglang_router_port is not None, "the rules ask for both"
    host, port = args.sglang_router_ip, args.sglang_router_port
    router = ExternalRouter(host, port, patience_s=timeout_s(args, "no-engine"))
    for server in servers:
        router.enroll(server)
    router.start()
    return Endpoint(servers, port, router, host)


class Rotations:
    """Several endpoints of one fleet; each is notified of its own engines only."""

    def __init__(self, endpoints: Sequence[Endpoint]):
        self._rotation_of: dict[str, Rotation] = {
            server.url: endpoint.front
            for endpoint in endpoints
            for server in endpoint.servers
            if endpoint.front is not None  # a single engine is asked directly
        }

    def include(self, server: FleetServer, front: Rotation) -> None:
        """Notify `front` of an engine that joins later."""
        self._rotation_of[server.url] = front

    def add(self, server: FleetServer) -> None:
        if server.url in self._rotation_of:
            self._rotation_of[server.url].add(server)

    def remove(self, url: str) -> None:
        if url in self._rotation_of:
            self._rotation_of[url].remove(url)


class ModelService:
    """Engines of one model, and the load balancers in front of them.

    `num_reserved`: number of engines, the last of the fleet, that have an address of their own.
    """

    def __init__(self, args: Args, model: ServedModel, servers: Sequence[FleetServer], num_reserved: int = 0):
        self._args, self.model = args, model
        self.fleet = EngineFleet(servers, _watch_policy(args))
        num_shared = len(servers) - num_reserved
        self._shared, self._reserved = tuple(servers[:num_shared]), tuple(servers[num_shared:])
        self._endpoints: list[Endpoint] = []

    @property
    def failures(self) -> list[concurrent.futures.Future[None]]:
        """Return futures of which any that fails ends the run."""
        return [self.fleet.failure, *(router.failure for router in self._routers)]

    @property
    def _routers(self) -> list[SGLangRouter | ExternalRouter]:
        fronts = (endpoint.front for endpoint in self._endpoints)
        return [front for front in fronts if isinstance(front, SGLangRouter | ExternalRouter)]

    @property
    def balancers(self) -> dict[Address, Balancer]:
        """Return slime's own load balancers by their addresses; they are in this process."""
        return {(e.host, e.port): e.front for e in self._endpoints if isinstance(e.front, Balancer)}

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the engines that are not reserved for evaluation."""
        return tuple(server.url for server in self._shared)

    def start_routers(self, run_: Run) -> tuple[Address, Address | None]:
        """Start the routers; return the address for requests, and the address of the reserved engines."""
        args = self._args
        is_policy = self.model is args.engine_topology.policy
        plan = plan_router(self.model, args.rollout_router)
        name = "router" if is_policy else f"{self.model.name}-router"
        if is_policy and args.sglang_router_ip is not None:
            self._endpoints = [join_router(args, self._shared)]
        else:
            port = args.sglang_router_port if is_policy else None
            self._endpoints = [open_endpoint(args, run_, plan, self._shared, name, port)]
        if self._reserved:
            self._endpoints.append(open_endpoint(args, run_, plan, self._reserved, f"reserved-{name}", None))
        self._rotations = Rotations(self._endpoints)
        self.fleet.follow(self._rotations)
        first, *others = [(endpoint.host, endpoint.port) for endpoint in self._endpoints]
        return first, others[0] if others else None

    def add_engine(self, server: FleetServer) -> None:
        """Let an engine join the ones that generate. ValueError: it cannot."""
        front = self._endpoints[0].front
        if front is None:
            raise ValueError(
                "this run asks its only engine directly: start it with --sglang-router-port 0, which puts a "
                "load balancer in front of it"
            )
        self._rotations.include(server, front)
        self.fleet.admit(server)
        self._shared = (*self._shared, server)

    def remove_engine(self, url: str) -> None:
        """Let an engine leave. ValueError: it is unknown here, or the last one that generates."""
        found = [server for server in self._shared if server.url == url]
        if not found or len(self._shared) == 1:
            why = "it is the only engine that generates" if found else "no such engine generates"
            raise ValueError(f"{url}: {why}; there are {', '.join(self.urls)}")
        self.fleet.dismiss(found[0])
        self._shared = tuple(server for server in self._shared if server.url != url)

    def close(self) -> None:
        for router in self._routers:
            router.stop()
        self.fleet.stop()
        for endpoint in self._endpoints:
            if isinstance(endpoint.front, Balancer):  # last: it holds requests that engines still answer
                run(endpoint.front.stop())


def make_servers(
    args: Args, run_: Run, slots: tuple[Slot, ...], runtime: Runtime
) -> dict[str, list[FleetServer]]:
    """Return the engines of each model, not yet started; external engines are asked what they serve."""
    if not slots:
        return {}
    if args.rollout_external_engine_addrs:
        for address in args.rollout_external_engine_addrs:
            run_.engine_token.use_for(read_address(address))
        engines = discover(args.rollout_external_engine_addrs, args.hf_checkpoint)
        if args.eval_num_engines and any(engine.worker_type != "regular" for engine in engines):
            raise ValueError(
                "--eval-num-engines with prefill and decode engines: they work in pairs behind one router; "
                "remove it."
            )
        for engine in engines:
            if args.deterministic_mode and not engine.info.has_seeds:
                logger.warning(
                    "--deterministic-mode: the engine at %s was started without SGLang's "
                    "--enable-deterministic-inference, and its tokens differ from run to run",
                    engine.url,
                )
        patience_s = timeout_s(args, "engine-start")
        return {args.engine_topology.policy.name: [ExternalServer(engine, patience_s) for engine in engines]}
    servers: dict[str, list[FleetServer]] = {}
    plans = iter(plan_engines(args, run_, slots))
    for place, nodes in zip(place_engines(args.engine_topology), by_engine(slots), strict=True):
        parts = [
            (
                plan,
                functools.partial(
                    runtime.spawn, WorkerSpec(plan.name, slot, near_driver=True), EngineServer, plan
                ),
                timeout_s(args, "host"),
            )
            for slot, plan in zip(nodes, plans, strict=False)  # the plans of this engine's slots
        ]
        head = HostedEngine(*parts[0], [HostedEngine(*part) for part in parts[1:]])
        servers.setdefault(place.model, []).append(head)
    return servers


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """Return one launch plan per slot, in the order of the topology."""
    kind = ENGINES[args.rollout_engine]
    cores = cores_each(slots)
    # An engine with a Python of its own has its own modules, too.
    imports = {} if kind.own_python else import_environment()
    models = {model.name: model for model in args.engine_topology.models}

    nodes = [
        (replace(place, node=node, num_nodes=len(own)), slot)
        for place, own in zip(place_engines(args.engine_topology), by_engine(slots), strict=True)
        for node, slot in enumerate(own)
    ]
    plans = []
    for place, slot in nodes:
        path, pushed = models[place.model].model_path, models[place.model].update_weights
        if path is None:
            raise ValueError("--hf-checkpoint is required: engines serve its model.")
        row = QUANTIZATIONS.get(args.rollout_quantization) if pushed else None
        make_config = load_function(f"{row.code}.engine_config") if row is not None else None
        quantization = make_config(args.rollout_engine, path) if make_config is not None else None
        threads = args.engine_threads or kind.command.num_threads(Path(path), cores)
        name = f"{place.name}-node-{place.node}" if place.node else place.name
        site = EngineSite(path, pushed, place, slot.gpu_ids, slot.host, run.shm_prefix, threads, quantization)
        environment = {**thread_environment(threads), **imports, **kind.command.run_environment(args, site)}
        plan = LaunchPlan(
            name=name,
            command=kind.command.run_command(args, site),
            env={**environment, **slot.env},
            log_path=run.run_dir / "logs" / f"{name}.log",
            start_timeout_s=timeout_s(args, "engine-start"),
            worker_type=place.worker_type,
            host=slot.host,
            beside_trainer=slot.host == run.host,
            token=run.engine_token.at(slot.host),
        )
        plans.append(plan)
    return plans


def _policy_engines(args: Args, slots: tuple[Slot, ...]) -> list[tuple[Slot, ...]]:
    """Return the slots of each engine that gets the trainer's weights."""
    engines, name = by_engine(slots), args.engine_topology.policy.name
    if args.rollout_external_engine_addrs or not slots:
        return engines
    places = place_engines(args.engine_topology)
    return [own for place, own in zip(places, engines, strict=True) if place.model == name]


def ranks_on_engines(args: Args, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Return, for each engine that gets the trainer's weights, the trainer ranks on its devices."""
    rank_on = {gpu: slot.index for slot in placement.trainer for gpu in slot.gpus}
    engines = _policy_engines(args, placement.engines)
    return tuple(
        tuple(rank_on[gpu] for slot in own for gpu in slot.gpus if gpu in rank_on) for own in engines
    )


def takes_handles(args: Args, placement: Placement) -> bool:
    """Return whether every engine can take handles to GPU memory, which trainer ranks on its GPUs make.

    An engine over several machines does not: nobody has seen that work yet.
    """
    training = {gpu for slot in placement.trainer for gpu in slot.gpus}
    engines = _policy_engines(args, placement.engines)
    return all(len(own) == 1 and training.issuperset(own[0].gpus) for own in engines)


def _watch_policy(args: Args) -> WatchPolicy:
    return WatchPolicy(
        restart_limit=limit(args, "engine-restarts"),
        restart_window_s=_RESTART_WINDOW_S,
        silence_limit_s=timeout_s(args, "engine-silence") or None,
        probe_interval_s=args.rollout_health_check_interval if args.use_fault_tolerance else None,
        probe_timeout_s=timeout_s(args, "health-check"),
        probe_first_wait_s=args.rollout_health_check_first_wait,
        probe_failures=limit(args, "probe-failures"),
        no_engine_timeout_s=timeout_s(args, "no-engine"),
    )
