"""A rollout worker with load balancers of its own: no response to it passes through the driver."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from slime.arguments import RunInfo, plugin_args
from slime.engines.balancer import Address, make_balancer
from slime.rollout.workers.worker import RolloutWorker, WorkerSettings
from slime.utils.async_utils import run
from slime.utils.machine.run_identity import LOOPBACK

# Of each load balancer of the driver: address, name and token of the engines in its rotation.
Rotations = Mapping[Address, tuple[tuple[str, str, str | None], ...]]


class BalancedWorker(RolloutWorker):
    """Requests that would go to a load balancer of the driver go to one in this process instead."""

    def __init__(self, settings: WorkerSettings, rotations: Rotations):
        args, info = settings.args, settings.info
        seen = plugin_args(args, RunInfo(info.run_id, info.run_dir))
        self._balancers, own = {}, {}
        for address, engines in rotations.items():
            # In another order in each worker: else the first request of each would go to the same engine.
            urls = [url for url, *_ in random.Random().sample(engines, len(engines))]
            self._balancers[address] = make_balancer(args, seen, urls)
            own[address] = LOOPBACK, run(self._balancers[address].start())
        routers = {name: own.get(address, address) for name, address in info.sglang_model_routers.items()}
        if info.sglang_router_ip is not None and info.sglang_router_port is not None:
            first = info.sglang_router_ip, info.sglang_router_port
            host, port = own.get(first, first)
            info = replace(info, sglang_router_ip=host, sglang_router_port=port)
        super().__init__(replace(settings, info=replace(info, sglang_model_routers=routers)))
        for engines in rotations.values():
            self.know_engines(engines)

    def rotate(self, rotations: Rotations) -> None:
        """Send requests to these engines from now on."""
        for address, engines in rotations.items():
            self.know_engines(engines)
            self._balancers[address].keep([url for url, *_ in engines])
