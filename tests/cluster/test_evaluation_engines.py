"""Engines that are kept for evaluation: in the fleet like the others, behind an address of their own."""

import json
from types import SimpleNamespace

import pytest
from argument_helpers import parse
from patience import PATIENCE_S

from slime.arguments.groups.topology import plain_topology
from slime.cluster.serving.served_model import ModelService
from slime.liveness.waits import until
from slime.utils import http_utils
from slime.utils.async_utils import run


class Server:
    """An engine that serves until it is killed, and again after its next launch."""

    bootstrap_port = None

    def __init__(self, port: int):
        self.plan, self.pid = SimpleNamespace(name=f"engine-{port}", worker_type="regular"), port
        self.url, self.up = f"http://127.0.0.1:{port}", True
        self.may_start = True

    def launch(self) -> None:
        self.up = True

    def wait_ready(self) -> str:
        until(lambda: self.may_start, "permission to start", PATIENCE_S)
        return self.url

    def alive(self) -> bool:
        return self.up

    def describe_end(self) -> str:
        return "was killed"

    def kill(self) -> None:
        self.up = False

    stop = kill


def workers(port: int) -> list[str]:
    answer = run(http_utils.get(f"http://127.0.0.1:{port}/workers"))
    return [worker["url"] for worker in answer["workers"]]


@pytest.fixture
def service(tmp_path):
    args = SimpleNamespace(
        rollout_router="builtin",
        sglang_router_ip=None,
        sglang_router_port=None,
        router_middleware_paths=[],
        timeouts={"no-engine": 5.0, "engine-silence": 0.0, "health-check": 5.0},
        limits={},
        use_fault_tolerance=False,
        rollout_health_check_first_wait=0.0,
        engine_topology=plain_topology("model", 5, 1),
        to_dict=dict,
    )
    servers = [Server(port) for port in (11, 12, 13, 14, 15)]
    made = ModelService(args, args.engine_topology.policy, servers, 2)
    made.fleet.wait_ready()
    fronts = made.start_routers(SimpleNamespace(run_id="x", run_dir=tmp_path))
    yield made, servers, tuple(port for _, port in fronts)
    made.close()


def test_each_address_knows_its_own_engines_and_the_fleet_knows_all(service):
    made, servers, (port, evaluation_port) = service
    urls = [server.url for server in servers]
    assert workers(port) == urls[:3] == list(made.urls) and workers(evaluation_port) == urls[3:]
    assert list(made.fleet.urls) == urls


def test_an_engine_leaves_and_returns_behind_the_address_it_belongs_to(service):
    _, servers, (port, evaluation_port) = service
    lost = servers[4]
    lost.may_start = lost.up = False
    until(lambda: workers(evaluation_port) == [servers[3].url], "the engine to leave", PATIENCE_S)
    assert len(workers(port)) == 3
    lost.may_start = True
    until(lambda: lost.url in workers(evaluation_port), "the engine to return", PATIENCE_S)
    assert len(workers(port)) == 3


def test_at_least_one_engine_is_left_for_training(tmp_path):
    data = tmp_path / "held.jsonl"
    data.write_text(json.dumps({"input": "a", "label": "a"}) + "\n")
    shared = {"eval_interval": 1, "eval_prompt_data": ["held", str(data)]}
    assert parse(**shared, rollout_num_gpus=2, eval_num_engines=1).eval_num_engines == 1
    with pytest.raises(
        ValueError, match=r"--eval-num-engines is 2, but the policy has 2 engines: at least one must"
    ):
        parse(**shared, rollout_num_gpus=2, eval_num_engines=2)
