"""A client that closes its socket in the middle of a stream is a normal end, and no fault of the engine."""

import asyncio
import logging
import socket
import struct

import aiohttp
import pytest
from patience import PATIENCE_S

from slime.engines.balancer import Balancer
from slime.utils.async_utils import run

CHUNK = 1 << 16
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"input_ids": [5], "stream": true}'
POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASK = POST + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


async def engine_of(num_chunks: int, may_end: asyncio.Event, breaks: bool) -> tuple[asyncio.Server, str]:
    """An engine that streams so many chunks, and ends its answer, or breaks, when it may."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        writer.write(HEAD)
        for _ in range(num_chunks):
            writer.write(b"%x\r\n%s\r\n" % (CHUNK, b"x" * CHUNK))
        await may_end.wait()
        if breaks:
            writer.transport.abort()
        else:
            writer.write(b"0\r\n\r\n")
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def scene(num_chunks, leave, breaks=False):
    may_end = asyncio.Event()
    server, engine = await engine_of(num_chunks, may_end, breaks)
    balancer = Balancer([engine])
    port = await balancer.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK)
    await reader.readexactly(100)
    await asyncio.sleep(0.1)  # what it does not read fills the buffers on the way
    await leave(writer)
    may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        while balancer._running[engine]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    server.close()
    await balancer.stop()
    return await reader.read()


async def closes(writer):
    writer.close()


async def resets(writer):
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def stays(writer):
    """It goes on reading; what breaks is the engine."""


@pytest.mark.parametrize("num_chunks", [1, 400])
@pytest.mark.parametrize("leave", [closes, resets])
def test_a_client_that_closes_its_socket_leaves_no_traceback(caplog, leave, num_chunks):
    with caplog.at_level(logging.DEBUG):
        run(scene(num_chunks, leave))
    assert "crashed during a request" not in caplog.text
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO or r.exc_info] == []


def test_a_client_whose_connection_ends_with_the_answer_leaves_no_traceback(caplog, monkeypatch):
    """It leaves while the end of the stream is written, which is not yet known to the connection."""

    async def cut(self, data=b""):
        if self._req is not None and self._req.transport is not None:
            self._req.transport.close()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write_eof", cut)
    with caplog.at_level(logging.DEBUG):
        run(scene(1, stays))
    assert "crashed during a request" not in caplog.text
    assert any("left before the end of its stream" in r.getMessage() for r in caplog.records)
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO or r.exc_info] == []


def test_a_stream_whose_engine_breaks_is_cut_for_its_client_and_told_in_a_line(caplog):
    with caplog.at_level(logging.DEBUG):
        read = run(scene(1, stays, breaks=True))
    assert not read.endswith(b"0\r\n\r\n"), "a stream that broke does not look like one that ended"
    assert "crashed in the middle of a stream" in caplog.text
    assert not any(record.exc_info for record in caplog.records)
