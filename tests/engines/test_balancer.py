"""The balancer before engines over real HTTP: who gets a request, where a session stays, what if engines are
down. All of it for requests that come through its socket, and for those of its own loop, which do not.
"""

import asyncio
import gzip
import socket
import time

import pytest
from balancer_world import PAYLOAD, balanced, member, post
from fake_engine import FakeEngine, refused_url
from patience import PATIENCE_S
from yarl import URL

from slime.engines import balancer as balancer_module
from slime.engines.balancer import SESSION_HEADER, Balancer
from slime.engines.engine_process import LaunchPlan
from slime.engines.fleet import WatchPolicy
from slime.engines.middleware import RouterAnswer, RouterRequest
from slime.engines.sglang.router import SGLangRouter, router_command
from slime.utils import async_utils, http_utils
from slime.utils.async_utils import run


def test_an_answer_passes_through_with_the_name_of_its_engine():
    with FakeEngine() as engine, balanced([engine.url]) as (url, _):
        answer = run(post(url))
        assert answer["meta_info"].pop("answered_by") == engine.url
        assert answer == run(post(engine.url))
        assert engine.requests[0] == PAYLOAD


def test_the_engine_with_the_fewest_requests_in_flight_is_next():
    with (
        FakeEngine() as fast,
        FakeEngine(lambda *_: {"until": lambda: len(fast.requests) == 5}) as slow,
        balanced([slow.url, fast.url]) as (url, _),
    ):

        async def send():
            waiting = asyncio.ensure_future(post(url))
            while not slow.requests:
                await asyncio.sleep(0.01)
            for _ in range(5):
                await post(url)
            await waiting

        run(send())
        assert (len(slow.requests), len(fast.requests)) == (1, 5)


def test_many_requests_at_once_are_spread_evenly():
    def all_are_there() -> bool:
        return len(one.requests) + len(two.requests) == 20

    held = {"until": all_are_there}
    with FakeEngine(lambda *_: held) as one, FakeEngine(lambda *_: held) as two:
        with balanced([one.url, two.url]) as (url, _):

            async def send():
                await asyncio.gather(*(post(url) for _ in range(20)))

            run(send())
        assert (one.most_running, two.most_running) == (10, 10)


def test_a_session_stays_with_its_engine():
    with FakeEngine() as one, FakeEngine() as two, balanced([one.url, two.url]) as (url, _):

        async def send():
            for _ in range(4):
                await asyncio.gather(post(url, session="a"), post(url, session="b"))

        run(send())
        for engine in (one, two):
            assert {headers[SESSION_HEADER] for headers in engine.headers} in ({"a"}, {"b"})
            assert len(engine.requests) == 4


def test_a_request_of_a_dead_engine_goes_to_another_and_its_session_moves():
    with FakeEngine() as alive:
        with balanced([refused_url(), alive.url]) as (url, _):
            for _ in range(3):
                assert run(post(url, session="a"))["output_ids"]
        assert len(alive.requests) == 3


def test_no_engine_left_is_a_503():
    with balanced([refused_url(), refused_url()]) as (url, balancer):
        with pytest.raises(http_utils.HttpError, match="no engine answers") as error:
            run(post(url))
        assert error.value.status == 503
        assert all(not running for running in balancer._running.values())


def test_a_sick_engine_does_not_draw_requests_that_another_can_serve():
    with FakeEngine(lambda *_: 500) as sick, FakeEngine() as well, balanced([sick.url, well.url]) as (url, _):
        for _ in range(4):
            assert run(post(url))["output_ids"]
        assert len(well.requests) == 4


def test_when_every_engine_fails_the_last_error_is_the_answer():
    engines = FakeEngine(lambda *_: 500), FakeEngine(lambda *_: 503)
    with (
        engines[0] as one,
        engines[1] as two,
        balanced([one.url, two.url], no_engine_timeout_s=30.0) as (url, _),
    ):
        with pytest.raises(http_utils.HttpError, match="scripted 503"):
            run(post(url))
        assert len(one.requests) == len(two.requests) == 1


def test_a_refusal_of_an_engine_is_its_answer_and_not_tried_elsewhere():
    with FakeEngine(lambda *_: 400) as bad, FakeEngine() as other, balanced([bad.url, other.url]) as (url, _):
        with pytest.raises(http_utils.HttpError, match="scripted 400") as error:
            run(post(url))
        assert error.value.status == 400
        assert other.requests == []


def test_the_workers_are_listed_for_those_who_address_them_directly():
    with FakeEngine() as one, FakeEngine() as two, balanced([one.url, two.url]) as (url, _):
        workers = run(http_utils.get(f"{url}/workers"))["workers"]
        assert [worker["url"] for worker in workers] == [one.url, two.url]


def test_a_request_of_an_engine_that_leaves_the_rotation_is_answered_by_another():
    with (
        FakeEngine(lambda *_: {"delay_s": PATIENCE_S}) as stuck,
        FakeEngine() as other,
        balanced([stuck.url]) as (url, balancer),
    ):
        future = asyncio.run_coroutine_threadsafe(post(url), async_utils.get_loop())
        while not stuck.requests:
            time.sleep(0.01)
        balancer.add(member(other.url))
        balancer.remove(stuck.url)
        assert future.result(PATIENCE_S)["output_ids"] and len(other.requests) == 1


def test_an_engine_that_left_gets_nothing_until_it_returns():
    with FakeEngine() as one, FakeEngine() as two, balanced([one.url, two.url]) as (url, balancer):
        balancer.remove(one.url)
        for _ in range(3):
            run(post(url))
        assert (len(one.requests), len(two.requests)) == (0, 3)
        assert [w["url"] for w in run(http_utils.get(f"{url}/workers"))["workers"]] == [two.url]
        balancer.add(member(one.url))
        balancer.remove(two.url)
        run(post(url))
        assert len(one.requests) == 1


def test_requests_wait_for_an_engine_to_return():
    with FakeEngine() as engine, balanced([engine.url], no_engine_timeout_s=PATIENCE_S) as (url, balancer):
        balancer.remove(engine.url)
        future = asyncio.run_coroutine_threadsafe(post(url), async_utils.get_loop())
        time.sleep(0.3)
        assert not future.done()
        balancer.add(member(engine.url))
        assert future.result(PATIENCE_S)["output_ids"]


def test_the_wait_for_an_engine_ends():
    with balanced([refused_url()], no_engine_timeout_s=0.4) as (url, _):
        started = time.monotonic()
        with pytest.raises(http_utils.HttpError, match="no engine answers"):
            run(post(url))
        assert time.monotonic() - started >= 0.4


def test_a_port_that_is_taken_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as thief,
        pytest.raises(ValueError, match="--sglang-router-port is"),
    ):
        run(Balancer([]).start(port=thief.getsockname()[1]))


# -- requests that break engines -----------------------------------------------------------------------------


def breaks(*numbers):
    """A script of an engine whose connection breaks under the requests with these numbers."""
    return lambda payload, number: {"break": True} if not numbers or number in numbers else None


def watch(balancer, monkeypatch):
    """Takes an engine out at the moment in which it breaks, as the watch of a fleet does some time later."""
    attempt = balancer._try

    async def try_once(url, errand):
        try:
            return await attempt(url, errand)
        except balancer_module._EngineCrashed:
            balancer._running.pop(url, None)
            raise

    monkeypatch.setattr(balancer, "_try", try_once)


def test_a_request_that_breaks_its_engine_is_not_sent_to_the_next():
    with FakeEngine(breaks()) as one, FakeEngine(breaks()) as two, balanced([one.url, two.url]) as (url, _):
        with pytest.raises(http_utils.HttpError, match="crashed on this request") as error:
            run(post(url))
        assert error.value.status == 422  # a client of ours sends it no more
        assert sorted([len(one.requests), len(two.requests)]) == [0, 2]


def test_a_request_whose_engine_died_goes_back_to_it_when_it_returns(monkeypatch):
    with FakeEngine(breaks(0)) as one, FakeEngine() as two:
        with balanced([one.url, two.url], no_engine_timeout_s=PATIENCE_S) as (url, balancer):
            watch(balancer, monkeypatch)
            future = asyncio.run_coroutine_threadsafe(post(url), async_utils.get_loop())
            while one.url in balancer._running:
                time.sleep(0.01)
            time.sleep(1.5)
            assert not future.done() and two.requests == []
            balancer.add(member(one.url))
            assert future.result(PATIENCE_S)["output_ids"]
        assert (len(one.requests), len(two.requests)) == (2, 0)


def test_requests_go_to_one_other_engine_when_theirs_stays_away_and_no_further(monkeypatch):
    def dies_with_company(payload, number):
        return {"break_when": 2}

    monkeypatch.setattr(balancer_module, "_RETURN_PATIENCE_S", 0.0)
    engines = [FakeEngine(dies_with_company) for _ in range(3)]
    with (
        engines[0] as one,
        engines[1] as two,
        engines[2] as three,
        balanced([one.url], no_engine_timeout_s=PATIENCE_S) as (url, balancer),
    ):
        watch(balancer, monkeypatch)

        async def send():
            return await asyncio.gather(*(post(url, session="a") for _ in range(2)), return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(send(), async_utils.get_loop())
        while one.url in balancer._running:
            time.sleep(0.01)
        for other in (two, three):
            balancer.add(member(other.url))
        answers = future.result(PATIENCE_S)
        assert [answer.status for answer in answers] == [422, 422]
        assert sorted([len(two.requests), len(three.requests)]) == [0, 2]


def test_an_engine_that_cannot_be_reached_is_no_reason_to_give_up():
    with FakeEngine() as alive, balanced([refused_url(), refused_url(), alive.url]) as (url, _):
        assert run(post(url))["output_ids"]


# -- what is forwarded ---------------------------------------------------------------------------------------

CONTROL = (
    *("pause_generation", "continue_generation", "release_memory_occupation", "resume_memory_occupation"),
    *(
        "update_weights_from_disk",
        "update_weights_from_shared_memory",
        "update_weights_from_delta",
        "update_weights_from_tensor",
        "flush_cache",
    ),
    *(
        "init_weights_update_group",
        "update_weight_version",
        "weights_checker",
        "abort_request",
        "start_profile",
    ),
    *(
        "set_internal_state",
        "load_lora_adapter",
        "freeze_gc",
        "shutdown",
        "",
        "generate/",
        "//pause_generation",
    ),
    *(
        "generate/../pause_generation",
        "generate%2f..%2fpause_generation",
        "v1/../pause_generation",
        "GENERATE",
    ),
)


@pytest.mark.parametrize("middlewares", [(), ("passes",)])
def test_only_what_generates_is_forwarded(middlewares):
    class Passes:
        async def handle(self, request, forward):
            return await forward(request)

    async def call(url, path):
        target = URL(f"{url}/{path}", encoded=True)
        async with http_utils.get_session().post(target, json={"mode": "abort"}) as answer:
            return answer.status

    with (
        FakeEngine() as engine,
        balanced([engine.url], middlewares=[Passes() for _ in middlewares]) as (url, _),
    ):
        statuses = {path: run(call(url, path)) for path in CONTROL}
        assert statuses == dict.fromkeys(CONTROL, 404)
        assert engine.paths == [] and run(post(url))["output_ids"]
        assert engine.paths == ["/generate"]


def test_a_compressed_body_is_refused_and_not_unfolded():
    async def call(url):
        data = gzip.compress(b" " * (100 << 20))
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with http_utils.get_session().post(f"{url}/generate", data=data, headers=headers) as answer:
            return answer.status

    with FakeEngine() as engine, balanced([engine.url]) as (url, _):
        assert run(call(url)) == 415 and engine.paths == []


def test_an_engine_that_asks_for_a_token_gets_it_whatever_the_client_sent():
    async def call(url):
        headers = {"authorization": "Bearer EMPTY"}
        async with http_utils.get_session().post(f"{url}/generate", json=PAYLOAD, headers=headers) as answer:
            return answer.status

    with FakeEngine() as one, FakeEngine() as two:
        http_utils.authorize(one.url, "secret")
        for engine, expected in ((one, "Bearer secret"), (two, "Bearer EMPTY")):
            with balanced([engine.url]) as (url, _):
                assert run(call(url)) == 200
            given = [value for name, value in engine.headers[0].items() if name.lower() == "authorization"]
            assert given == [expected]


class Shout:
    """Changes the request and the answer."""

    def __init__(self, word):
        self.word = word

    async def handle(self, request, forward):
        payload = {**request.payload, "input_ids": [*request.payload["input_ids"], self.word]}
        answer = await forward(RouterRequest(request.path, payload, request.headers))
        return RouterAnswer(
            answer.status, {**answer.payload, "words": [*answer.payload.get("words", []), self.word]}
        )


def test_middlewares_see_requests_from_the_outside_in_and_answers_back():
    with FakeEngine() as engine, balanced([engine.url], middlewares=[Shout(1), Shout(2)]) as (url, _):
        answer = run(post(url, session="a"))
        assert engine.requests[0]["input_ids"] == [5, 6, 1, 2] and answer["words"] == [2, 1]
        assert engine.headers[0][SESSION_HEADER] == "a"


class Broken:
    async def handle(self, request, forward):
        raise KeyError("text")


def test_a_middleware_that_fails_is_named_and_nothing_is_repeated():
    with FakeEngine() as engine, balanced([engine.url], middlewares=[Broken()]) as (url, _):
        with pytest.raises(http_utils.HttpError, match="middleware Broken: KeyError: 'text'") as error:
            run(post(url))
        assert error.value.status == 422 and engine.requests == []


def test_sglang_s_router_names_a_port_that_is_taken_and_starts_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as thief:
        port = thief.getsockname()[1]
        plan = LaunchPlan(
            "router", router_command("/no/python", "round_robin"), {}, tmp_path / "router.log", 5.0
        )
        with pytest.raises(ValueError, match=f"--sglang-router-port is {port}: another program uses it"):
            SGLangRouter(plan, WatchPolicy(5, 600.0), port=port).start()
    assert not (tmp_path / "router.log").exists()
