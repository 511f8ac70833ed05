"""`--sglang-router-ip`: a router that others run learns of the run's engines, and is left as it was found."""

import sys
from types import SimpleNamespace

import pytest
from argument_helpers import parse
from external_router import OtherRouter, RegisteredEngine
from fake_engine import FakeEngine
from patience import eventually

from slime.arguments.groups.topology import plain_topology
from slime.arguments.passthrough.router_flags import need_router_python
from slime.arguments.passthrough.sglang_flags import find_python
from slime.cluster.serving.served_model import ModelService
from slime.engines.engine_process import LaunchPlan
from slime.engines.fleet import WatchPolicy
from slime.engines.sglang import router as router_module
from slime.engines.sglang.router import ExternalRouter, SGLangRouter, router_command
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped

PAYLOAD = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
SETTINGS = {"rollout_engine": "sglang", "sglang_python": sys.executable}


def server(url, kind="regular", bootstrap_port=None):
    return SimpleNamespace(
        url=url, plan=SimpleNamespace(worker_type=kind), bootstrap_port=bootstrap_port, pulse=None
    )


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(router_module, "_LOOK_S", 0.05)


def test_engines_join_leave_and_return_and_one_that_forgot_them_is_told_again(quick):
    with OtherRouter() as other:
        router = ExternalRouter("127.0.0.1", other.port, patience_s=600.0)
        router.enroll(server("http://a:1", "prefill", 8998))
        router.enroll(server("http://b:2", "decode"))
        router.start()
        found = {url: (w["worker_type"], w.get("bootstrap_port")) for url, w in other.workers.items()}
        assert found == {"http://a:1": ("prefill", 8998), "http://b:2": ("decode", None)}
        router.remove("http://a:1")
        assert list(other.workers) == ["http://b:2"]
        router.add(server("http://a:1"))
        other.workers.clear()  # it was started again
        eventually(lambda: set(other.workers) == {"http://a:1", "http://b:2"})
        other.workers["http://c:3"] = {"url": "http://c:3", "id": "9"}
        router.stop()
        assert list(other.workers) == ["http://c:3"]  # another's engine stays


def test_a_router_that_does_not_come_back_ends_the_run(quick):
    with OtherRouter() as other:
        router = ExternalRouter("127.0.0.1", other.port, patience_s=0.1)
        router.enroll(server("http://a:1"))
        router.start()
    with pytest.raises(RunStopped, match=r"\(--sglang-router-ip\) has not responded for"):
        router.failure.result(60)
    router.stop()


def test_plug_ins_get_the_address_of_the_router_that_was_given(tmp_path):
    with OtherRouter() as other, FakeEngine() as engine:
        made = ModelService(service_args(other.port), plain_topology("model", 1, 1).policy, [])
        made._args.engine_topology = SimpleNamespace(policy=made.model)
        made._shared = [server(engine.url)]
        front, evaluation = made.start_routers(SimpleNamespace(run_id="x", run_dir=tmp_path))
        assert front == ("127.0.0.1", other.port) and evaluation is None
        assert run(http_utils.post(f"{other.url}/generate", PAYLOAD))["output_ids"]
        assert len(made.failures) == 2
        made.close()
        assert not other.workers


def service_args(port):
    return SimpleNamespace(
        rollout_router="sglang", sglang_router_ip="127.0.0.1", sglang_router_port=port,
        timeouts={"no-engine": 5.0, "engine-silence": 0.0, "health-check": 5.0}, limits={},
        use_fault_tolerance=False,
        rollout_health_check_first_wait=0.0, engine_topology=None,
    )  # fmt: skip


@pytest.mark.sglang
def test_sglangs_own_router_takes_the_engines_and_forgets_them_at_the_end(tmp_path):
    if find_python(None, ".venv-router", "sglang_router") is None:
        pytest.skip("there is no sglang-router: `make sglang-env`")
    command = router_command(need_router_python("this test"), "round_robin")
    theirs = SGLangRouter(
        LaunchPlan("router", command, {}, tmp_path / "router.log", 120.0), WatchPolicy(5, 600.0)
    )
    with RegisteredEngine() as one, RegisteredEngine() as two:
        try:
            router = ExternalRouter("127.0.0.1", theirs.start(), patience_s=600.0)
            for engine in (one, two):
                router.enroll(server(engine.url))
            router.start()
            assert router_module.known_workers(router.url, healthy=True) == {one.url, two.url}
            for _ in range(4):
                assert run(http_utils.post(f"{router.url}/generate", PAYLOAD, max_retries=20))["output_ids"]
            assert len(one.requests) == len(two.requests) == 2
            router.stop()
            eventually(lambda: not router_module.known_workers(theirs.url))
        finally:
            theirs.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "a router that runs already has a port, too; add --sglang-router-port"),
        (
            {"sglang_router_port": 30000, "router_middleware_paths": "a.b"},
            "are called by the built-in balancer; leave --sglang-router-ip out",
        ),
        (
            {"sglang_router_port": 30000, "rollout_engine": "embedded", "sglang_python": None},
            "adds fields of its own to requests, which --rollout-engine embedded refuses",
        ),
    ],
)
def test_what_a_given_router_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(sglang_router_ip="10.0.0.1", **(SETTINGS | changes))


def test_an_address_of_version_6_is_written_as_urls_have_it_and_flags_of_a_router_of_ours_are_told_of():
    args = parse("--router-policy", "manual", sglang_router_ip="::1", sglang_router_port=30000, **SETTINGS)
    assert (args.sglang_router_ip, args.rollout_router, args.router_options) == ("[::1]", "sglang", [])
    assert any("--router-policy is set, but the router of --sglang-router-ip" in w for w in args.warnings)
