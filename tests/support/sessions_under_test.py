"""Generate functions over sessions that tests name on the command line; `made` has who began."""

import asyncio

import aiohttp
from patience import LONG_S

from slime.agent.adapters import adapter_of
from slime.agent.session import Session, SessionError

made: list[int] = []
NUM_TURNS = 3


async def three_turns(args, sample, sampling_params):
    made.append(sample.index)
    session = Session.of_run(args, sample, sampling_params)
    messages = [{"role": "user", "content": str(sample.prompt)}]
    for _ in range(NUM_TURNS):
        answer = await session.turn(messages)
        messages += [answer.message, {"role": "user", "content": "on"}]
    return session.samples(sample, reward=1.0)


async def three_turns_over_http(args, sample, sampling_params):
    made.append(sample.index)
    adapter = await adapter_of(args)
    session = adapter.open_session(sample.session_id, sampling_params)
    try:
        await _converse(adapter.url, sample)
        return await adapter.finish_session(sample.session_id, base_sample=sample, reward=1.0, args=args)
    finally:
        if adapter.session(sample.session_id) is session:
            await asyncio.shield(adapter.shutdown_session(sample.session_id))
            adapter.drop_session(sample.session_id)


async def _converse(url, sample):
    messages = [{"role": "user", "content": str(sample.prompt)}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {sample.session_id}"}) as http:
        for _ in range(NUM_TURNS):
            body = {"model": "m", "messages": messages}
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                text = (await answer.json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]


async def says_nothing(args, sample, sampling_params):
    """A function that forgot to return."""
    await Session.of_run(args, sample, sampling_params).turn(
        [{"role": "user", "content": str(sample.prompt)}]
    )


async def asks_nothing(args, sample, sampling_params):
    """A program that ended before its first request."""
    adapter = await adapter_of(args)
    adapter.open_session(sample.session_id, sampling_params)
    return await adapter.finish_session(sample.session_id, base_sample=sample, reward=1.0, args=args)


async def shares_a_key(args, sample, sampling_params):
    """Two agents with one name."""
    adapter = await adapter_of(args)
    adapter.open_session("agent", sampling_params)
    await asyncio.sleep(LONG_S)  # until the other one has failed
    return await adapter.finish_session("agent", base_sample=sample, reward=1.0, args=args)


async def never_stops(args, sample, sampling_params):
    """Turns until the context is full, which it does not expect."""
    session = Session.of_run(args, sample, sampling_params)
    messages = [{"role": "user", "content": str(sample.prompt)}]
    while True:
        answer = await session.turn(messages)
        messages += [answer.message, {"role": "user", "content": "on"}]


async def stops_when_full(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params)
    messages = [{"role": "user", "content": str(sample.prompt)}]
    try:
        while True:
            answer = await session.turn(messages)
            messages += [answer.message, {"role": "user", "content": "on"}]
    except SessionError:
        return session.samples(sample, reward=1.0)


BODIES = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 20},
}
client_asks: list[tuple[str, dict]] = []  # (path, fields of the body) of each turn of the next episodes
client_statuses: set[int] = set()


async def client_that_chooses(args, sample, sampling_params):
    """An agent program that sends the sampling of `client_asks` and takes what it gets."""
    adapter = await adapter_of(args)
    adapter.open_session(sample.session_id, sampling_params)
    headers = {"Authorization": f"Bearer {sample.session_id}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for number, (path, fields) in enumerate(client_asks):
            body = {"model": "m", **BODIES[path](f"{sample.prompt} {number}"), **fields}
            async with http.post(f"{adapter.url}{path}", json=body) as response:
                client_statuses.add(response.status)
                await response.read()
    return await adapter.finish_session(sample.session_id, base_sample=sample, reward=1.0, args=args)
