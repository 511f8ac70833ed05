"""One address before engines: the engine itself where there is one,
the built-in balancer, or SGLang's router.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.arguments import Args, RunInfo, plugin_args
from slime.cluster.run import Run
from slime.cluster.serving.engine_plan import plan_router_process
from slime.engines.fleet import Rotation, Server
from slime.engines.router import Balancer
from slime.engines.sglang.router import SGLangRouter
from slime.engines.topology import RouterPlan
from slime.utils.async_utils import run
from slime.utils.http_utils import token_of
from slime.utils.misc import load_function


class Front:
    """`name`: of the router's log. `rotation` hears who leaves and
    returns; None: a single engine needs no telling.
    """

    def __init__(self, args: Args, plan: RouterPlan, servers: Sequence[Server], name: str):
        self._args, self._plan, self.servers, self._name = args, plan, tuple(servers), name
        self._balancer: Balancer | None = None
        self._router: SGLangRouter | None = None

    @property
    def rotation(self) -> Rotation | None:
        return self._router or self._balancer

    @property
    def failures(self) -> list:
        """Futures of which any ends the run."""
        return [self._router.failure] if self._router is not None else []

    def start(self, run_: Run, port: int | None) -> int:
        """Returns the port that requests go to."""
        args, servers = self._args, self.servers
        if self._plan.kind == "sglang" or any(server.plan.worker_type != "regular" for server in servers):
            words = (*self._plan.words, *args.router_options)
            self._router = SGLangRouter(plan_router_process(args, run_, self._name, words), port=port or 0)
            for server in servers:
                self._router.enroll(server)
            return self._router.start()
        asked = port is not None or args.router_middleware_paths
        # An engine that asks for a token cannot be asked directly by
        # code that has none: the balancer adds it.
        here = servers[0].url.startswith("http://127.0.0.1:") and token_of(servers[0].url) is None
        if len(servers) == 1 and not asked and here:
            return int(servers[0].url.rpartition(":")[2])
        seen = plugin_args(args, RunInfo(run_.run_id, str(run_.run_dir)))
        self._balancer = Balancer(
            [server.url for server in servers],
            no_engine_timeout_s=args.no_engine_timeout_s,
            middlewares=[load_function(path)(seen) for path in args.router_middleware_paths],
        )
        return run(self._balancer.start(port=port or 0))

    def close(self) -> None:
        if self._router is not None:
            self._router.stop()

    def close_last(self) -> None:
        """After the engines: the balancer holds requests that they still answer."""
        if self._balancer is not None:
            run(self._balancer.stop())


class Rotations:
    """Several fronts before one fleet: each hears of its own engines, from its start on."""

    def __init__(self, fronts: Sequence[Front]):
        self._front_of = {server.url: front for front in fronts for server in front.servers}

    def add(self, server: Server) -> None:
        rotation = self._front_of[server.url].rotation
        if rotation is not None:
            rotation.add(server)

    def remove(self, url: str) -> None:
        rotation = self._front_of[url].rotation
        if rotation is not None:
            rotation.remove(url)
