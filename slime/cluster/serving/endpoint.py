"""One address before engines: of a single one, of the built-in balancer, or of a router of SGLang's."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments import Args, RunInfo, plugin_args
from slime.catalog.deadlines import timeout_s
from slime.cluster.serving.engine_plan import plan_router_process
from slime.engines.balancer import Balancer
from slime.engines.fleet import FleetServer, Rotation
from slime.engines.launch_plan import RouterPlan
from slime.engines.sglang.router import SGLangRouter
from slime.engines.sglang.router_registry import ExternalRouter
from slime.utils.async_utils import run
from slime.utils.http_utils import token_of
from slime.utils.machine.run_identity import LOOPBACK, Run
from slime.utils.misc import load_function


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`port`: where requests go. Neither router nor balancer: to the single engine itself."""

    servers: tuple[FleetServer, ...]
    port: int
    router: SGLangRouter | ExternalRouter | None = None
    balancer: Balancer | None = None
    host: str = LOOPBACK

    @property
    def rotation(self) -> Rotation | None:
        """Hears which engines leave and return; None: a single engine needs no telling."""
        return self.router or self.balancer

    @property
    def failures(self) -> list[concurrent.futures.Future[None]]:
        """Futures of which any ends the run."""
        return [self.router.failure] if self.router is not None else []

    def close(self) -> None:
        if self.router is not None:
            self.router.stop()

    def close_last(self) -> None:
        """Called after the engines were closed: the balancer holds requests that they still answer."""
        if self.balancer is not None:
            run(self.balancer.stop())


def open_endpoint(
    args: Args, run_: Run, plan: RouterPlan, servers: Sequence[FleetServer], name: str, port: int | None
) -> Endpoint:
    """Starts what stands before engines that serve. `name` is that of its log, `port` the one asked for."""
    servers = tuple(servers)
    if plan.kind == "sglang" or any(server.plan.worker_type != "regular" for server in servers):
        words = (*plan.words, *args.router_options)
        process = plan_router_process(args, run_, name, words)
        router = SGLangRouter(process, port=port or 0, silence_limit_s=timeout_s(args, "engine-silence"))
        for server in servers:
            router.enroll(server)
        return Endpoint(servers, router.start(), router=router)
    asked = port is not None or args.router_middleware_paths
    # An engine that asks for a token cannot be asked directly by code that has none: the balancer adds it.
    here = servers[0].url.startswith(f"http://{LOOPBACK}:") and token_of(servers[0].url) is None
    if len(servers) == 1 and not asked and here:
        return Endpoint(servers, int(servers[0].url.rpartition(":")[2]))
    seen = plugin_args(args, RunInfo(run_.run_id, str(run_.run_dir)))
    balancer = Balancer(
        [server.url for server in servers],
        no_engine_timeout_s=timeout_s(args, "no-engine"),
        middlewares=[load_function(path)(seen) for path in args.router_middleware_paths],
    )
    return Endpoint(servers, run(balancer.start(port=port or 0)), balancer=balancer)


def join_router(args: Args, servers: Sequence[FleetServer]) -> Endpoint:
    """Tells the router that --sglang-router-ip names which engines serve."""
    assert args.sglang_router_ip is not None and args.sglang_router_port is not None, "the rules ask for both"
    host, port = args.sglang_router_ip, args.sglang_router_port
    router = ExternalRouter(host, port, patience_s=timeout_s(args, "no-engine"))
    for server in servers:
        router.enroll(server)
    router.start()
    return Endpoint(tuple(servers), port, router=router, host=host)


class Rotations:
    """Several endpoints before one fleet: each hears of its own engines."""

    def __init__(self, endpoints: Sequence[Endpoint]):
        self._rotation_of = {
            server.url: endpoint.rotation for endpoint in endpoints for server in endpoint.servers
        }

    def add(self, server: FleetServer) -> None:
        rotation = self._rotation_of[server.url]
        if rotation is not None:
            rotation.add(server)

    def remove(self, url: str) -> None:
        rotation = self._rotation_of[url]
        if rotation is not None:
            rotation.remove(url)
