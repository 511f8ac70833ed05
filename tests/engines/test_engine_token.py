"""An engine that other machines reach asks for a token, which only its own run has."""

import aiohttp
import psutil
import pytest
from engine_under_test import small_embedded_command
from tiny_model import make_tiny_model

from slime.engines.balancer import Balancer
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.children import import_environment, thread_environment
from slime.utils.machine.run_identity import EngineToken
from slime.wire.control import EngineControl


async def status_of(url: str, payload: dict, authorization: str | None = None) -> int:
    headers = {"Authorization": authorization} if authorization is not None else {}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload, headers=headers) as answer:
        return answer.status


def test_beyond_loopback_only_who_has_the_token_is_served_and_the_balancer_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv(http_utils.TOKEN_VARIABLE, raising=False)
    host = http_utils.get_host_info()[1]
    if http_utils.is_loopback(host):
        pytest.skip("this machine has no address but loopback")
    token = EngineToken.make()
    model, prefix = make_tiny_model(tmp_path / "model", layers=1), shm.make_prefix()
    command = small_embedded_command(model, prefix, max_total_tokens=1024, host=host)
    env = {**thread_environment(1), **import_environment()}
    plan = LaunchPlan("engine", command, env, tmp_path / "engine.log", 120.0, host=host, token=token.at(host))
    server, balancer = EngineServer(plan), Balancer([])
    payload = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    try:
        server.launch()
        url = server.wait_ready()
        assert host in url and plan.token == token.value
        process = psutil.Process(server.pid)
        assert token.value not in " ".join(process.cmdline()), "everybody reads command lines"
        sockets = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert sockets == [host]
        for path in ("generate", "pause_generation", "update_weights_from_disk", "nowhere"):
            for given in (None, "Bearer no", "Bearer \xe9", f"Bearer {token.value}x"):
                assert run(status_of(f"{url}/{path}", payload, given)) == 401
        assert run(EngineControl(url).version()) == "default"
        assert run(EngineControl(url).healthy(60.0))
        assert run(http_utils.post(f"{url}/generate", payload))["output_ids"]
        assert token.value not in str(run(http_utils.get(f"{url}/server_info")))
        port = run(balancer.start())
        balancer.add(server)
        assert run(status_of(f"http://127.0.0.1:{port}/generate", payload)) == 200
    finally:
        server.stop()
        run(balancer.stop())
        shm.unlink_prefix(prefix)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.5", False),
        ("engine.example", False),
        ("", False),
    ],
)
def test_what_only_this_machine_reaches(host, expected):
    assert http_utils.is_loopback(host) is expected
