"""Streams through the balancer, deadlines, and those who leave: clients and engines."""

import asyncio
import logging
import time

import aiohttp
import pytest
from balancer_world import PAYLOAD, balanced, member, post
from fake_engine import FakeEngine
from patience import PATIENCE_S, longer_each_time

from slime.engines.balancer import Balancer
from slime.utils import async_utils, http_utils
from slime.utils.async_utils import run

HELD = {**PAYLOAD, "rid": "a"}
STREAM = {**HELD, "stream": True}


def idle(balancer) -> bool:
    return not any(balancer._running.values())


async def release(engine) -> None:
    await http_utils.post(f"{engine.url}/abort_request", {"rid": "a"}, max_retries=0)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_events_pass_through_with_the_name_of_their_engine():
    async def read(url):
        return [event async for event in http_utils.stream(f"{url}/generate", STREAM)]

    with FakeEngine() as engine, balanced([engine.url]) as (url, balancer):
        events = run(read(url))
        assert events and {event["meta_info"]["answered_by"] for event in events} == {engine.url}
        run(until(lambda: idle(balancer)))


def test_a_stream_counts_at_its_engine_until_it_is_left():
    async def scene(url, balancer, stuck, other):
        events = http_utils.stream(f"{url}/generate", STREAM)
        await anext(events)
        balancer._running.setdefault(other.url, set())
        assert [len(visits) for visits in balancer._running.values()] == [1, 0]
        assert (await post(url))["meta_info"]["answered_by"] == other.url  # which has fewer
        await until(lambda: "a" in stuck._held)
        await events.aclose()
        await until(lambda: idle(balancer))
        await release(stuck)

    with (
        FakeEngine(lambda *_: {"hold": True}) as stuck,
        FakeEngine() as other,
        balanced([stuck.url]) as (url, balancer),
    ):
        run(scene(url, balancer, stuck, other))


def test_whoever_reads_a_stream_sees_it_break_when_its_engine_leaves():
    async def read(url):
        return [event async for event in http_utils.stream(f"{url}/generate", STREAM)]

    with (
        FakeEngine(lambda *_: {"hold": True}) as stuck,
        FakeEngine() as other,
        balanced([stuck.url]) as (url, balancer),
    ):
        future = asyncio.run_coroutine_threadsafe(read(url), async_utils.get_loop())
        while "a" not in stuck._held:
            time.sleep(0.01)
        balancer.add(member(other.url))
        balancer.remove(stuck.url)
        with pytest.raises(http_utils.HttpError, match="the stream broke"):
            future.result(PATIENCE_S)
        assert other.requests == []
        run(until(lambda: idle(balancer)))


@pytest.mark.parametrize("streams", [False, True])
def test_who_waits_no_longer_does_not_make_an_engine_broken(streams):
    async def ask(url, timeout_s):
        if not streams:
            return await http_utils.post(f"{url}/generate", HELD, max_retries=0, timeout_s=timeout_s)
        return [event async for event in http_utils.stream(f"{url}/generate", STREAM, timeout_s=timeout_s)]

    with FakeEngine(lambda *_: {"hold": True}) as engine, balanced([engine.url]) as (url, balancer):
        for timeout_s in longer_each_time(0.3):
            with pytest.raises(http_utils.HttpError, match="TimeoutError") as error:
                run(ask(url, timeout_s))
            assert error.value.status == 0
            if engine.requests:  # on a busy machine it may not have reached the engine in this time
                break
        assert len(engine.requests) == 1
        run(until(lambda: idle(balancer)))
        run(release(engine))


def test_a_stream_that_no_engine_takes_is_an_error_with_its_status():
    async def read(url):
        return [event async for event in http_utils.stream(f"{url}/generate", STREAM)]

    with FakeEngine(lambda *_: 400) as refuses, balanced([refuses.url]) as (url, balancer):
        with pytest.raises(http_utils.HttpError, match="scripted 400") as error:
            run(read(url))
        assert error.value.status == 400 and str(error.value).startswith(f"{url}/generate answered 400")
        balancer.remove(refuses.url)
        with pytest.raises(http_utils.HttpError, match="no engine answers") as error:
            run(read(url))
        assert error.value.status == 503


def test_a_loop_of_another_thread_goes_through_the_socket():
    with FakeEngine() as engine, balanced([engine.url]) as (url, _):

        async def ask():
            try:
                return await post(url)
            finally:
                await http_utils.close_session()

        assert asyncio.run(ask())["meta_info"]["answered_by"] == engine.url


def test_the_address_of_a_balancer_that_was_stopped_is_nobody_s():
    with FakeEngine() as engine:
        with balanced([engine.url]) as (url, _):
            assert run(post(url))["output_ids"]
        with pytest.raises(http_utils.HttpError, match="no response after 1 attempts"):
            run(post(url))


def test_a_client_that_leaves_before_the_end_of_a_stream_is_not_held_against_the_engine(caplog):
    async def scene():
        served, may_end = [], asyncio.Event()

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
            served.append(head)
            kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n" + b"a\r\ndata: {}\n\n\r\n")
            await may_end.wait()
            writer.write(b"0\r\n\r\n")

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        balancer = Balancer([engine])
        url = f"http://127.0.0.1:{await balancer.start()}"
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{url}/generate", json={**PAYLOAD, "stream": True})
            assert await answer.content.readany() == b"data: {}\n\n"
            answer.close()
        while any(one.transport is not None for one in balancer._runner.server.connections):
            await asyncio.sleep(0.01)
        may_end.set()
        while balancer._running[engine]:
            await asyncio.sleep(0.01)
        server.close()
        await balancer.stop()
        return served

    with caplog.at_level(logging.DEBUG):
        served = run(asyncio.wait_for(scene(), PATIENCE_S))
    assert len(served) == 1 and "crashed during a request" not in caplog.text
