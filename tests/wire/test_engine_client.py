"""The client retries where that helps, raises where it does not, and never waits without a deadline."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from slime.liveness.waits import WaitTimeout
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError
from slime.wire.client import SESSION_HEADER, EngineClient
from slime.wire.control import EngineControl
from slime.wire.protocol import GenerateRequest, SamplingParams

ANSWER = {
    "text": "a",
    "output_ids": [7],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-1, 7, None]],
    },
}
REQUEST = GenerateRequest([1, 2], SamplingParams(max_new_tokens=1), rid="r")


@asynccontextmanager
async def serve(**handlers):
    """A server with one POST handler per endpoint; yields its address."""
    app = web.Application()
    for endpoint, handler in handlers.items():
        app.router.add_post(f"/{endpoint}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answers(*statuses, seen=None):
    """A handler that answers with these statuses in turn."""
    left = list(statuses)

    async def handler(request):
        if seen is not None:
            seen.append((await request.json(), request.headers))
        status = left.pop(0)
        return web.json_response(ANSWER if status == 200 else {"error": "no"}, status=status)

    return handler


def test_a_restarting_engine_is_tried_again():
    async def scene():
        async with serve(generate=answers(503, 500, 200)) as url:
            return await EngineClient(url).generate(REQUEST)

    assert run(scene()).ids == (7,)


def test_a_bad_request_raises_at_once():
    seen = []

    async def scene():
        async with serve(generate=answers(400, 200, seen=seen)) as url:
            await EngineClient(url).generate(REQUEST)

    with pytest.raises(HttpError) as error:
        run(scene())
    assert error.value.status == 400 and len(seen) == 1


def test_an_id_that_the_engine_still_holds_is_sent_until_it_lets_go():
    seen = []

    async def handler(request):
        seen.append((await request.json())["rid"])
        if len(seen) < 3:
            error = {"error": {"message": "Duplicate request ID detected: r"}}
            return web.json_response(error, status=400)
        return web.json_response(ANSWER)

    async def scene():
        async with serve(generate=handler) as url:
            return await EngineClient(url).generate(REQUEST)

    assert run(scene()).ids and seen == ["r"] * 3


def test_a_silent_engine_is_a_named_timeout():
    async def silent(request):
        await asyncio.sleep(30)

    async def scene():
        async with serve(generate=silent) as url:
            await EngineClient(url, timeout_s=0.2).generate(REQUEST)

    with pytest.raises(WaitTimeout, match="request r"):
        run(scene())


def test_requests_beyond_the_cap_wait_in_the_client():
    running = most = 0
    met = asyncio.Event()  # the first wait for each other, however late one comes

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            met.set()
        await met.wait()
        await asyncio.sleep(0.02)
        running -= 1
        return web.json_response(ANSWER)

    async def scene():
        async with serve(generate=handler) as url:
            client = EngineClient(url, max_running=3)
            await asyncio.gather(*[client.generate(REQUEST) for _ in range(10)])

    run(scene())
    assert most == 3


def test_a_session_travels_as_the_router_s_header():
    seen = []

    async def scene():
        async with serve(generate=answers(200, seen=seen)) as url:
            request = GenerateRequest([1], session="s-1")
            await EngineClient(url).generate(request, headers={"X-Other": "y"})

    run(scene())
    _, headers = seen[0]
    assert headers[SESSION_HEADER] == "s-1" and headers["X-Other"] == "y"


def test_cancelling_reaches_every_worker_and_shrugs_at_a_dead_one():
    seen = []

    async def handler(request):
        seen.append((await request.json())["rid"])
        return web.Response()

    async def scene():
        async with serve(abort_request=handler) as url:
            dead = "http://127.0.0.1:9"
            await EngineClient(url).cancel([url, dead], ["a", "b"])

    run(scene())
    assert sorted(seen) == ["a", "b"]


def test_a_control_call_is_not_repeated():
    seen = []

    async def scene():
        async with serve(pause_generation=answers(500, 200, seen=seen)) as url:
            await EngineControl(url).pause("retract")

    with pytest.raises(HttpError):
        run(scene())
    assert [body for body, _ in seen] == [{"mode": "retract"}]


def test_an_engine_that_says_no_success_is_an_error():
    async def refuses(request):
        return web.json_response({"success": False, "message": "no room"})

    async def scene():
        async with serve(update_weights_from_disk=refuses) as url:
            await EngineControl(url).update_from_disk("/x", "run:1")

    with pytest.raises(RuntimeError, match="refused weights run:1: no room"):
        run(scene())


def test_a_dead_engine_is_not_healthy():
    assert run(EngineControl("http://127.0.0.1:9").healthy()) is False


def test_leaving_a_stream_ends_its_request():
    gone = asyncio.Event()

    async def generate(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(b'data: {"made": %d}\r\n\r\n' % count for count in range(1, 6)))
        try:
            while True:  # until the client has gone
                await response.write(b": still here\n")
                await asyncio.sleep(0.005)
        except ConnectionError:
            gone.set()
            raise

    async def scene():
        async with serve(generate=generate) as url:
            async with aclosing(http_utils.stream(f"{url}/generate", {})) as events:
                first = await anext(events)
            await asyncio.wait_for(gone.wait(), 60)
            return first

    assert run(scene()) == {"made": 1}
