"""One served model: its engines, the fleet that keeps them alive, and what stands before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime.arguments import Args, RunInfo, plugin_args
from slime.arguments.topology import ServedModel
from slime.cluster.engine_plan import plan_engines, plan_router_process
from slime.cluster.placement import Placement, Slot
from slime.cluster.run import Run
from slime.engines.external import ExternalServer, discover
from slime.engines.fleet import EngineFleet, Server, WatchPolicy
from slime.engines.router import Balancer
from slime.engines.server import EngineServer
from slime.engines.sglang.router import SGLangRouter
from slime.engines.topology import place_engines, plan_router
from slime.utils.async_utils import run
from slime.utils.misc import load_function


class ModelService:
    """Engines of one model and their router. `on_join`: brings an engine that was started again up to date."""

    def __init__(self, args: Args, model: ServedModel, servers: Sequence[Server], on_join: Callable[[str], None]):
        self._args, self.model = args, model
        self.fleet = EngineFleet(servers, _watch_policy(args), on_join)
        self._balancer: Balancer | None = None
        self.router: SGLangRouter | None = None

    @property
    def failures(self) -> list:
        """Futures of which any ends the run."""
        return [self.fleet.failure, *([self.router.failure] if self.router is not None else [])]

    def start_router(self, run_: Run, port: int | None) -> int:
        """What requests go to; a single engine needs nothing before it. Returns its port."""
        args, servers = self._args, self.fleet.servers
        is_split = any(server.plan.worker_type != "regular" for server in servers)
        plan = plan_router(self.model, args.rollout_router)
        if plan.kind == "sglang" or is_split:
            words = (*plan.words, *args.router_options)
            self.router = SGLangRouter(plan_router_process(args, run_, self.model, words), port=port or 0)
            for server in servers:
                self.router.enroll(server)
            self.fleet.follow(self.router)
            return self.router.start()
        asked = port is not None or args.router_middleware_paths
        if len(servers) == 1 and not asked and servers[0].url.startswith("http://127.0.0.1:"):
            return int(servers[0].url.rpartition(":")[2])
        seen = plugin_args(args, RunInfo(run_.run_id, str(run_.run_dir)))
        middlewares = [load_function(path)(seen) for path in args.router_middleware_paths]
        self._balancer = Balancer(
            [server.url for server in servers],
            no_engine_timeout_s=args.no_engine_timeout_s,
            middlewares=middlewares,
        )
        bound = run(self._balancer.start(port=port or 0))
        self.fleet.follow(self._balancer)
        return bound

    def close(self) -> None:
        if self.router is not None:
            self.router.stop()
        self.fleet.stop()
        if self._balancer is not None:
            run(self._balancer.stop())


def make_servers(args: Args, run_: Run, slots: tuple[Slot, ...]) -> dict[str, list[Server]]:
    """The engines of each model, not yet started; external ones are asked who they are."""
    if not slots:
        return {}
    if args.rollout_external_engine_addrs:
        engines = discover(args.rollout_external_engine_addrs, args.hf_checkpoint)
        if args.rollout_router != "sglang" and any(engine.worker_type != "regular" for engine in engines):
            raise ValueError(
                "--rollout-external-engine-addrs names prefill or decode engines, which need SGLang's router; "
                "use --rollout-router sglang."
            )
        patience_s = args.engine_start_timeout_s
        return {args.engine_topology.policy.name: [ExternalServer(engine, patience_s) for engine in engines]}
    servers: dict[str, list[Server]] = {}
    for place, plan in zip(place_engines(args.engine_topology), plan_engines(args, run_, slots), strict=True):
        servers.setdefault(place.model, []).append(EngineServer(plan))
    return servers


def policy_slots(args: Args, slots: tuple[Slot, ...]) -> tuple[tuple[int, ...], ...]:
    """Devices of each engine that gets the trainer's weights."""
    if args.rollout_external_engine_addrs or not slots:
        return tuple(slot.gpu_ids for slot in slots)
    name = args.engine_topology.policy.name
    places = place_engines(args.engine_topology)
    return tuple(slot.gpu_ids for place, slot in zip(places, slots, strict=True) if place.model == name)


def trains_on_every_gpu(args: Args, placement: Placement) -> bool:
    """Whether each GPU of an engine that gets weights has a trainer rank on it, which can hand them over in its memory."""
    training = {gpu for slot in placement.trainer for gpu in slot.gpu_ids}
    return all(training.issuperset(gpu_ids) for gpu_ids in policy_slots(args, placement.engines))


def _watch_policy(args: Args) -> WatchPolicy:
    return WatchPolicy(
        restart_limit=args.engine_restart_limit,
        restart_window_s=args.engine_restart_window_s,
        probe_interval_s=args.rollout_health_check_interval if args.use_fault_tolerance else None,
        probe_timeout_s=args.rollout_health_check_timeout,
        probe_first_wait_s=args.rollout_health_check_first_wait,
        probe_failures=args.rollout_health_check_failures,
        no_engine_timeout_s=args.no_engine_timeout_s,
    )
