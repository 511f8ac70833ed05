"""Whatever comes over HTTP is answered or refused with a 4xx, and the next request is served.

The embedded engine has its own file (`tests/engines/embedded/test_hostile_requests.py`); the balancer, the
endpoints for agents, the page and the publisher of weights are here.
"""

import asyncio
import contextlib
import json
import socket
from urllib.parse import quote, urlsplit

import aiohttp
import pytest
from agent_world import agent_world
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from page_world import make_run, serving
from yarl import URL

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.engines.balancer import ENDPOINTS, Balancer
from slime.engines.middleware import RouterAnswer
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.weight_sync.delta.weight_agent import publisher_app
from tests.fuzz.strategies import ANYTHING, few, nearly

RAW = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 50_000, b'{"messages": [' + b"9" * 5000 + b"]}", b"null", b'"x"']
    ),
)
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Authorization", "X-Api-Key", "Accept", "X-SMG-Routing-Key", "Host"]),
    st.text(st.sampled_from([chr(n) for n in (*range(33, 127), *range(161, 256))]), max_size=20),
    max_size=3,
)


def send(url, body=None, method="POST", headers=None):
    """(status, text) of whatever is answered; a body that is no bytes goes as JSON."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {**({"Content-Type": "application/json"} if data is not None else {}), **(headers or {})}

    async def ask():
        timeout = aiohttp.ClientTimeout(total=60)
        target = URL(url, encoded=True)
        session = http_utils.get_session()
        async with session.request(method, target, data=data, headers=headers, timeout=timeout) as answer:
            return answer.status, await answer.text(errors="replace")

    return run(ask())


def send_bytes(url, data):
    """Bytes that may be no HTTP at all; what is answered before the connection ends or a moment passes."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(4096)
    return b""


REQUESTS = st.one_of(
    st.binary(max_size=200),
    st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "X" * 50, "\x00"]),
        st.text(max_size=30),
        st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", ""]),
        st.text(max_size=60),
    ).map(lambda t: f"{t[0]} /{t[1]} {t[2]}\r\n{t[3]}\r\n\r\n".encode("utf-8", "replace")),
    st.sampled_from(
        [
            b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
            b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999\r\n\r\n{}",
            b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
            b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        ]
    ),
)


def refuses_bytes(url):
    @few(25)
    @given(data=REQUESTS)
    def check(data):
        answer = send_bytes(url, data)
        assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")), answer[:300]

    check()


# -- the balancer --------------------------------------------------------------------------------------------


class Passes:
    async def handle(self, request, forward):
        answer = await forward(request)
        return RouterAnswer(answer.status, answer.payload)


@pytest.mark.parametrize("middlewares", [(), (Passes(),)], ids=["plain", "middleware"])
def test_the_balancer_forwards_or_refuses_whatever_comes(middlewares):
    def script(payload, number):
        return None if isinstance(payload.get("input_ids"), list) else 400

    with FakeEngine(script) as engine:
        balancer = Balancer([engine.url], middlewares=middlewares)
        url = f"http://127.0.0.1:{run(balancer.start())}"
        try:

            @few(40)
            @given(
                path=st.one_of(st.sampled_from(sorted(ENDPOINTS)), st.text(max_size=20)),
                body=st.one_of(RAW, nearly(input_ids=st.just([5]), stream=st.booleans(), rid=st.text())),
                headers=HEADERS,
            )
            def check(path, body, headers):
                headers.pop("Host", None)
                known = (
                    path == "generate" and isinstance(body, dict) and isinstance(body.get("input_ids"), list)
                )
                status, text = send(f"{url}/{quote(path)}", body, headers=headers)
                if path not in ENDPOINTS or known:
                    assert status < 500, (path, body, status, text)

            check()
            refuses_bytes(url)
            sound = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
            assert send(f"{url}/generate", sound)[0] == 200
        finally:
            run(balancer.stop())


# -- endpoints for agents ------------------------------------------------------------------------------------

TEXTS = st.text(max_size=12)
PARTS = st.lists(nearly(type=st.sampled_from(["text", "image_url", "tool_result"]), text=TEXTS), max_size=2)
CALLS = st.lists(
    nearly(id=TEXTS, type=st.just("function"), function=nearly(name=TEXTS, arguments=TEXTS)), max_size=2
)
MESSAGES = st.lists(
    nearly(
        role=st.sampled_from(["user", "assistant", "system", "tool"]),
        content=st.one_of(TEXTS, PARTS),
        tool_calls=CALLS,
        tool_call_id=TEXTS,
    ),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(
    nearly(type=st.just("function"), name=TEXTS, function=nearly(name=TEXTS, parameters=ANYTHING)), max_size=2
)
COMMON = {
    "model": TEXTS,
    "max_tokens": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "stop": st.lists(TEXTS, max_size=2),
    "stream": st.booleans(),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "n": st.integers(1, 2),
    "seed": st.integers(),
    "metadata": st.just({}),
}
BODIES = {
    "/v1/chat/completions": nearly(messages=MESSAGES, response_format=st.just({"type": "text"}), **COMMON),
    "/v1/responses": nearly(input=st.one_of(TEXTS, MESSAGES), instructions=TEXTS, **COMMON),
    "/v1/messages": nearly(messages=MESSAGES, system=TEXTS, **COMMON),
    "/v1/messages/count_tokens": nearly(messages=MESSAGES, system=TEXTS, **COMMON),
}
KEY = {"Authorization": "Bearer key-1"}


@pytest.fixture(scope="module")
def agents():
    with agent_world(lambda prompt: "ok") as world:
        yield world


@pytest.mark.parametrize("path", BODIES)
def test_an_endpoint_for_agents_answers_or_refuses_whatever_comes(agents, path):
    @few(60)
    @given(body=st.one_of(BODIES[path], BODIES[path], RAW, ANYTHING), headers=st.one_of(st.just({}), HEADERS))
    def check(body, headers):
        headers.pop("Host", None)
        status, text = send(agents.url + path, body, headers={**KEY, **headers})
        assert status < 500, (body, status, text[:500])

    check()
    sound = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 20, "model": "m"}
    assert send(agents.url + path, sound, headers=KEY)[0] in (200, 400)  # 400: a field of another API
    assert send(agents.url + "/healthz", method="GET")[0] == 200


def test_bytes_that_are_no_http_leave_the_endpoints_for_agents_in_service(agents):
    refuses_bytes(agents.url)
    assert send(agents.url + "/healthz", method="GET")[0] == 200


# -- the page ------------------------------------------------------------------------------------------------

NAMES = ("order", "step", "kind", "dataset", "outcome", "q", "limit", "offset", "after", "name", "width")
QUERY = st.dictionaries(
    st.sampled_from([*NAMES, "smooth", "from", "to", "x", "end"]),
    st.one_of(
        st.sampled_from(
            ["train", "eval", "made", "newest", "worst", "best", "difference", "time", "rollout/raw_reward"]
        ),
        st.integers(-(10**20), 10**20).map(str),
        st.sampled_from(
            ["nan", "inf", "-inf", "1e400", "0", "-1", "", "'; DROP TABLE samples; --", "9" * 5000]
        ),
        st.text(max_size=12),
    ),
    max_size=5,
)
ASKED = ["", "/metrics", "/curves", "/samples", "/steps", "/prompts", "/outcomes", "/timeline", "/settings"]
ASKED += ["/logs", "/logs/driver.log", "/actions", "/samples/1", f"/samples/{10**30}", f"/prompts/-{10**30}"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("page") / "run", 2)
    with serving(folder) as (url, token):
        yield url, token


@few(250)
@given(path=st.one_of(st.sampled_from(ASKED), st.text(max_size=15).map(lambda t: "/" + t)), query=QUERY)
def test_the_page_answers_or_refuses_whatever_is_asked(page, path, query):
    words = "&".join(f"{quote(k)}={quote(v, errors='replace')}" for k, v in query.items())
    status, text = send(f"{page[0]}/api/runs/run{quote(path, errors='replace')}?{words}", method="GET")
    assert status < 500, (path, query, status, text[:500])
    if status == 200 and "/logs" not in path:
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@few(100)
@given(body=st.one_of(nearly(name=st.just("lr"), value=st.floats()), ANYTHING, RAW), headers=HEADERS)
def test_an_action_is_refused_whatever_it_says(page, body, headers):
    headers.pop("Host", None)
    url, token = page
    for more in ({"Authorization": f"Bearer {token}"}, {}):
        status, text = send(f"{url}/api/runs/run/actions", body, headers={**headers, **more})
        assert 400 <= status < 500, (body, status, text[:500])


def test_bytes_that_are_no_http_leave_the_page_in_service(page):
    refuses_bytes(page[0])
    assert send(f"{page[0]}/api/runs", method="GET")[0] == 200


# -- published weights ---------------------------------------------------------------------------------------


def test_a_publisher_gives_nothing_but_what_is_published_whatever_is_asked(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "published"
    (folder / "full-1").mkdir(parents=True)
    (folder / "full-1" / "part").write_text("weights")
    handle = run_app_in_thread(publisher_app(folder))
    url = f"http://127.0.0.1:{handle.port}"
    pieces = st.sampled_from(
        ["..", "full-1", "part", "secret.txt", "%2e%2e", "%2f", "/", "\\", "%00", "delta-1"]
    )
    try:

        @few(80)
        @given(path=st.one_of(st.lists(pieces, max_size=5).map("/".join), st.text(max_size=20).map(quote)))
        def check(path):
            status, text = send(f"{url}/{path}", method="GET")
            assert status < 500 and "secret" not in text

        check()
        assert send(f"{url}/full-1/part", method="GET") == (200, "weights")
    finally:
        handle.stop()
        asyncio.set_event_loop(None)
