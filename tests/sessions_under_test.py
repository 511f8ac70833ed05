"""Generate functions over sessions that tests name on the command line; `made` has who began."""

import asyncio

import aiohttp

from slime.agent.adapters import adapter_of
from slime.agent.session import Session

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
