"""Clients that read slowly or not at all, leave in mid-answer and come back; many at once."""

import asyncio
import json
import socket
import threading

from agent_world import agent_world, check_exact

from slime.utils.types import Sample

NUM_CLIENTS = 40
PATIENCE_S = 300


class OnceHeld:
    """The first answer to each prompt is never finished, the second is."""

    def __init__(self):
        self.seen, self.lock = set(), threading.Lock()

    def __call__(self, text):
        with self.lock:
            again = text in self.seen
            self.seen.add(text)
        return f"done {text[-30:]}" if again else {"hold": True, "tokens": [ord(c) - 33 for c in "abcd"]}


async def connect(world, number):
    """A client with hardly any room for what it does not read, whose request is sent."""
    loop, host, port = asyncio.get_running_loop(), *world.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client)
    messages = [{"role": "user", "content": f"client {number}"}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 300})
    head = f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer key-{number}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    return reader, writer


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def test_every_client_that_leaves_ends_its_request_and_gets_its_answer_when_it_comes_back():
    with agent_world(OnceHeld(), sid=None) as world:
        engine = world.engine
        for number in range(NUM_CLIENTS):
            world.adapter.open_session(f"key-{number}")

        async def come_and_go():
            clients = [await connect(world, number) for number in range(NUM_CLIENTS)]
            await until(lambda: engine.running == NUM_CLIENTS)
            for number, (_, writer) in enumerate(clients):  # politely, or as a process that is killed
                writer.close() if number % 2 else writer.transport.abort()
            await until(lambda: not engine.running and len(engine.aborts) == NUM_CLIENTS)

        async def come_back():
            return await asyncio.gather(*(read_slowly(number) for number in range(NUM_CLIENTS)))

        async def read_slowly(number):
            reader, writer = await connect(world, number)
            text = b""
            while some := await reader.read(200):
                text += some
                await asyncio.sleep(0.002)
            writer.close()
            return text

        asyncio.run(come_and_go())
        left = {request["rid"] for request in engine.requests}
        assert {abort["rid"] for abort in engine.aborts} == left
        told = asyncio.run(come_back())
        assert all(b"[DONE]" in text for text in told)
        for number in range(NUM_CLIENTS):
            closing = world.adapter.finish_session(f"key-{number}", base_sample=Sample(index=number))
            check_exact(world, asyncio.run(closing), num_turns=1)
