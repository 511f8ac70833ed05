"""A web page in the user's browser reaches loopback: engine, balancer and the like refuse what it sends."""

import json
import socket

import aiohttp
import pytest
from agent_world import agent_world
from hostile_calls import IDS
from patience import PATIENCE_S

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.engines.balancer import Balancer
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.weight_sync.delta.weight_agent import publisher_app, serve

JSON = {"Content-Type": "application/json"}
BODY = {"/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}, "/pause_generation": {}}
OF_PAGES = {
    "another site": {**JSON, "Origin": "https://evil.example"},
    "a file or a sandboxed frame": {**JSON, "Origin": "null"},
    "another page of this machine": {**JSON, "Origin": "http://localhost:9"},
    "a name of another site that leads here": {**JSON, "Host": "evil.example:80"},
    "a name that begins as ours": {**JSON, "Host": "localhost.evil.example"},
    "an image or a link": {**JSON, "Sec-Fetch-Site": "cross-site"},
    "text without a preflight": {"Content-Type": "text/plain"},
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "a form with files": {"Content-Type": "multipart/form-data; boundary=a"},
    "a body of no kind": {},
}
OF_CLIENTS = {
    "ours": JSON,
    "with a charset": {"Content-Type": "application/json; charset=utf-8"},
    "by name": {**JSON, "Host": "localhost:1234"},
    "through a tunnel": {**JSON, "Host": "127.0.0.1:9999"},
    "by IPv6": {**JSON, "Host": "[::1]:80"},
    "by an address of this machine": {**JSON, "Host": "10.1.2.3:30000"},
    "by the name of this machine": {**JSON, "Host": f"{socket.gethostname()}:30000"},
    "a page of the server's own": {**JSON, "Host": "localhost:7", "Origin": "http://localhost:7"},
}


TIMEOUT = aiohttp.ClientTimeout(total=PATIENCE_S)


def status(url, headers, body=None, method="POST"):
    """The status of a request with exactly these headers, and what it says."""

    async def ask():
        skip = ["Content-Type"] if "Content-Type" not in headers else []
        data = json.dumps(body).encode() if body is not None else None
        async with http_utils.get_session().request(
            method, url, data=data, headers=headers, skip_auto_headers=skip, timeout=TIMEOUT
        ) as response:
            return response.status, await response.text()

    return run(ask())


@pytest.fixture(scope="module")
def balancer(engine):
    made = Balancer([engine.url])
    yield f"http://127.0.0.1:{run(made.start())}"
    run(made.stop())


@pytest.mark.parametrize("path", BODY)
@pytest.mark.parametrize("which", OF_PAGES)
def test_an_engine_refuses_what_a_web_page_sends(engine, which, path):
    code, said = status(engine.url + path, OF_PAGES[which], BODY[path])
    assert code in (403, 415) and "error" in json.loads(said)
    assert status(f"{engine.url}/generate", JSON, BODY["/generate"])[0] == 200  # it was not paused


@pytest.mark.parametrize("which", OF_PAGES)
def test_the_balancer_refuses_what_a_web_page_sends(balancer, which):
    code, said = status(f"{balancer}/generate", OF_PAGES[which], BODY["/generate"])
    assert code in (403, 415) and "error" in json.loads(said)


@pytest.mark.parametrize(
    "which", ["another site", "an image or a link", "a name of another site that leads here"]
)
def test_a_web_page_reads_and_flushes_nothing(engine, balancer, which):
    for url in (f"{engine.url}/flush_cache", f"{engine.url}/get_server_info", f"{balancer}/workers"):
        assert status(url, OF_PAGES[which], method="GET")[0] == 403


@pytest.mark.parametrize("which", OF_CLIENTS)
def test_programs_are_served_as_before(engine, balancer, which):
    for url in (engine.url, balancer):
        assert status(f"{url}/generate", OF_CLIENTS[which], BODY["/generate"])[0] == 200
    assert status(f"{engine.url}/continue_generation", {})[0] == 200  # no body, so no type
    reader = {name: value for name, value in OF_CLIENTS[which].items() if name != "Content-Type"}
    assert status(f"{engine.url}/get_server_info", reader, method="GET")[0] == 200


def test_a_host_that_the_user_allows_is_served(engine, balancer, monkeypatch):
    headers = {**JSON, "Host": "engines.example:80"}
    monkeypatch.setenv("SLIME_ALLOWED_HOSTS", "other.example, engines.example")
    made = Balancer([engine.url])
    try:
        url = f"http://127.0.0.1:{run(made.start())}/generate"
        assert status(url, headers, BODY["/generate"])[0] == 200
        assert status(f"{balancer}/generate", headers, BODY["/generate"])[0] == 403
    finally:
        run(made.stop())


def test_endpoints_for_agents_and_published_weights_refuse_web_pages_too(tmp_path, monkeypatch):
    with agent_world(lambda prompt: "ok") as agents:
        body = {"model": "m", "messages": [{"role": "user", "content": "2+2"}]}
        url, key = f"{agents.url}/v1/chat/completions", {"Authorization": "Bearer key-1"}
        for which in ("another site", "an image or a link"):
            assert status(url, {**OF_PAGES[which], **key}, body)[0] == 403
        for which in ("ours", "with a charset"):
            assert status(url, {**OF_CLIENTS[which], **key, "Host": "host.docker.internal"}, body)[0] == 200
    app = publisher_app(tmp_path)
    monkeypatch.setattr("aiohttp.web.run_app", lambda app, sock, print: sock.close())
    serve(app, "127.0.0.1", 0)  # what it adds to the application stays
    handle = run_app_in_thread(app)
    try:
        (tmp_path / "published.json").write_text("{}")
        url = f"http://127.0.0.1:{handle.port}/published.json"
        for which in ("another site", "a name of another site that leads here"):
            assert status(url, OF_PAGES[which], method="GET")[0] == 403
        assert status(url, {}, method="GET")[0] == 200
    finally:
        handle.stop()
