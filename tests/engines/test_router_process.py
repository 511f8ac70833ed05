"""SGLang's real router over engines that compute nothing: registration, sessions, disaggregation, death."""

import os
import signal
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from external_router import RegisteredEngine
from fake_engine import FakeEngine
from patience import eventually

from slime.arguments.passthrough.router_flags import need_router_python, read_router_flags
from slime.arguments.passthrough.sglang_flags import find_python
from slime.engines.balancer import SESSION_HEADER
from slime.engines.engine_process import LaunchPlan
from slime.engines.fleet import WatchPolicy
from slime.engines.sglang.router import SGLangRouter, router_command
from slime.utils import http_utils
from slime.utils.async_utils import run

pytestmark = pytest.mark.sglang
PAYLOAD = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def python() -> str:
    if find_python(None, ".venv-router", "sglang_router") is None:
        pytest.skip("there is no sglang-router: `make sglang-env`")
    return need_router_python("this test")


def server(
    engine: FakeEngine, worker_type: str = "regular", bootstrap_port: int | None = None
) -> SimpleNamespace:
    return SimpleNamespace(
        url=engine.url, plan=SimpleNamespace(worker_type=worker_type), bootstrap_port=bootstrap_port
    )


def make_router(python: str, folder, policy: str, *words: str, silence_s: float = 10.0) -> SGLangRouter:
    plan = LaunchPlan("router", router_command(python, policy, words), {}, folder / "router.log", 120.0)
    return SGLangRouter(plan, WatchPolicy(5, 600.0, silence_limit_s=silence_s))


def ask(router: SGLangRouter, session: str | None = None):
    headers = {SESSION_HEADER: session} if session else None
    payload = {**PAYLOAD, "rid": session}
    return run(
        http_utils.post(f"{router.url}/generate", payload, max_retries=20, headers=headers, timeout_s=60)
    )


def known(router: SGLangRouter) -> set[str]:
    return {worker["url"] for worker in run(http_utils.get(f"{router.url}/workers"))["workers"]}


def test_engines_leave_and_return_sessions_stay_and_a_dead_router_comes_back_knowing_all(python, tmp_path):
    with RegisteredEngine() as one, RegisteredEngine() as two:
        router = make_router(python, tmp_path, "manual")
        try:
            for engine in (one, two):
                router.enroll(server(engine))
            port = router.start()
            assert known(router) == {one.url, two.url}
            for session in "abcdefgh" * 3:
                assert ask(router, session)["output_ids"]
            homes = [Counter(request["rid"] for request in engine.requests) for engine in (one, two)]
            assert not set(homes[0]) & set(homes[1]) and sum(homes, Counter()) == Counter("abcdefgh" * 3)

            router.remove(one.url)
            eventually(lambda: known(router) == {two.url})
            before = len(one.requests)
            for _ in range(4):
                ask(router)
            assert len(one.requests) == before
            router.add(server(one))
            eventually(lambda: known(router) == {one.url, two.url})

            os.kill(router._server.pid, signal.SIGKILL)
            eventually(lambda: router._watched.num_restarts == 1)
            assert router.url.endswith(f":{port}") and known(router) == {one.url, two.url}
            assert ask(router)["output_ids"]
        finally:
            router.stop()


def test_a_stopped_router_is_named_and_started_again(python, tmp_path, caplog):
    with RegisteredEngine() as engine:
        router = make_router(python, tmp_path, "round_robin", silence_s=3.0)
        try:
            router.enroll(server(engine))
            router.start()
            for process in (
                psutil.Process(router._server.pid),
                *psutil.Process(router._server.pid).children(recursive=True),
            ):
                process.suspend()
            eventually(lambda: router._watched.num_restarts == 1)
            assert (
                "router is removed from the fleet: no sign of life for 3 s" in caplog.text
                and "SIGSTOP" in caplog.text
            )
            assert ask(router)["output_ids"]
        finally:
            router.stop()


def test_the_router_tells_an_engine_the_token_it_asks_for_and_listens_on_loopback_alone(python, tmp_path):
    with RegisteredEngine() as engine:
        http_utils.authorize(engine.url, "secret")
        router = make_router(python, tmp_path, "round_robin")
        try:
            router.enroll(server(engine))
            router.start()
            assert ask(router)["output_ids"]
            assert {k.lower(): v for k, v in engine.headers[0].items()}["authorization"] == "Bearer secret"
            assert "secret" not in str(run(http_utils.get(f"{router.url}/workers")))
            family = [
                psutil.Process(router._server.pid),
                *psutil.Process(router._server.pid).children(recursive=True),
            ]
            sockets = [socket for process in family for socket in process.net_connections("inet")]
            assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        finally:
            router.stop()


def test_prefill_and_decode_engines_are_registered_as_such_and_both_get_the_request(python, tmp_path):
    with RegisteredEngine() as prefill, RegisteredEngine() as decode:
        router = make_router(python, tmp_path, "round_robin", "--pd-disaggregation")
        try:
            router.enroll(server(prefill, "prefill", 8998))
            router.enroll(server(decode, "decode"))
            router.start()
            listed = run(http_utils.get(f"{router.url}/workers"))["workers"]
            kinds = {
                worker["url"]: (worker["worker_type"], worker.get("bootstrap_port")) for worker in listed
            }
            assert kinds[prefill.url] == ("prefill", 8998) and kinds[decode.url][0] == "decode"
            assert ask(router)["output_ids"]
            assert len(prefill.requests) == len(decode.requests) == 1
            assert prefill.requests[0]["bootstrap_port"] == 8998
            assert prefill.requests[0]["bootstrap_room"] == decode.requests[0]["bootstrap_room"]
        finally:
            router.stop()


def test_flags_of_the_installed_router_are_known(python):
    assert read_router_flags({"--router-policy": ["manual"]}, python) == ["--policy", "manual"]
    with pytest.raises(ValueError, match="did you mean --router-policy"):
        read_router_flags({"--router-polcy": ["manual"]}, python)
    with pytest.raises(ValueError, match="--router-port cannot be given: --sglang-router-port decides it"):
        read_router_flags({"--router-port": ["1"]}, python)
