"""One served model: its engines, the fleet that keeps them alive, and the addresses before them."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence

from slime.arguments import Args
from slime.arguments.groups.topology import ServedModel
from slime.catalog.deadlines import timeout_s
from slime.catalog.limits import limit
from slime.cluster.serving.endpoint import Endpoint, Rotations, join_router, open_endpoint
from slime.cluster.serving.engine_host import host_engine
from slime.cluster.serving.engine_plan import plan_engines
from slime.engines.external import ExternalServer, discover, read_address
from slime.engines.fleet import EngineFleet, FleetServer, WatchPolicy
from slime.engines.launch_plan import place_engines, plan_router
from slime.runtime.base import Runtime, WorkerSpec
from slime.runtime.placement import Placement, Slot
from slime.utils.machine.run_identity import Run

logger = logging.getLogger(__name__)

_RESTART_WINDOW_S = 600.0  # --limits engine-restarts counts the deaths of this long

Address = tuple[str, int]  # host and port


class ModelService:
    """Engines of one model, and what stands before them once they serve.

    `num_reserved`: the last so many engines are in the fleet, and behind an address of their own.
    """

    def __init__(self, args: Args, model: ServedModel, servers: Sequence[FleetServer], num_reserved: int = 0):
        self._args, self.model = args, model
        self.fleet = EngineFleet(servers, _watch_policy(args))
        num_shared = len(servers) - num_reserved
        self._shared, self._reserved = servers[:num_shared], servers[num_shared:]
        self._endpoints: list[Endpoint] = []

    @property
    def failures(self) -> list[concurrent.futures.Future[None]]:
        """Futures of which any ends the run."""
        return [
            self.fleet.failure,
            *(failure for endpoint in self._endpoints for failure in endpoint.failures),
        ]

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the engines that are not reserved."""
        return tuple(server.url for server in self._shared)

    def start_routers(self, run_: Run) -> tuple[Address, Address | None]:
        """Where requests go: host and port, and those of the reserved engines."""
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
        self.fleet.follow(Rotations(self._endpoints))
        first, *others = [(endpoint.host, endpoint.port) for endpoint in self._endpoints]
        return first, others[0] if others else None

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
        self.fleet.stop()
        for endpoint in self._endpoints:
            endpoint.close_last()


def make_servers(
    args: Args, run_: Run, slots: tuple[Slot, ...], runtime: Runtime
) -> dict[str, list[FleetServer]]:
    """The engines of each model, not yet started; external ones are asked who they are."""
    if not slots:
        return {}
    if args.rollout_external_engine_addrs:
        for address in args.rollout_external_engine_addrs:
            run_.engine_token.use_for(read_address(address))
        engines = discover(args.rollout_external_engine_addrs, args.hf_checkpoint)
        if args.rollout_router != "sglang" and any(engine.worker_type != "regular" for engine in engines):
            raise ValueError(
                "--rollout-external-engine-addrs names prefill or decode engines, which need SGLang's "
                "router; use --rollout-router sglang."
            )
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
    plans = plan_engines(args, run_, slots)
    for place, plan, slot in zip(place_engines(args.engine_topology), plans, slots, strict=True):
        spec = WorkerSpec(plan.name, slot=slot, near_driver=True)
        servers.setdefault(place.model, []).append(host_engine(runtime, plan, spec, timeout_s(args, "host")))
    return servers


def _policy_slots(args: Args, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """The slots of the engines that get the trainer's weights."""
    if args.rollout_external_engine_addrs or not slots:
        return slots
    name = args.engine_topology.policy.name
    places = place_engines(args.engine_topology)
    return tuple(slot for place, slot in zip(places, slots, strict=True) if place.model == name)


def ranks_on_engines(args: Args, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """For each engine that gets the trainer's weights: the trainer ranks on its devices, in their order."""
    rank_on = {gpu: slot.index for slot in placement.trainer for gpu in slot.gpus}
    engines = _policy_slots(args, placement.engines)
    return tuple(tuple(rank_on[gpu] for gpu in slot.gpus if gpu in rank_on) for slot in engines)


def trains_on_every_gpu(args: Args, placement: Placement) -> bool:
    """Whether each GPU of an engine that gets weights has a trainer rank on it, which can hand them over."""
    training = {gpu for slot in placement.trainer for gpu in slot.gpus}
    return all(training.issuperset(slot.gpus) for slot in _policy_slots(args, placement.engines))


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
