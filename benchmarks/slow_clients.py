"""Many agents at once whose clients read slowly, leave in mid-answer and come back: is every abort answered?

A process of clients streams answers through the adapter from an embedded engine with a tiny model. Of a
hundred requests thirty are left in mid-answer, half of them as by a process that is killed, and asked again.
Told are the seconds that aborts took at the engine, how late the adapter's event loop was, and whether every
turn that a client read is in the samples, with all its tokens.

    python benchmarks/slow_clients.py [--sessions 1000] [--turns 1] [--running 64]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.agent.adapters import AgentAdapter
from slime.agent.engine_access import EnginePolicy
from slime.agent.session import Budget
from slime.liveness.stacks import watch_exit
from slime.utils.types import Sample

NUM_TOKENS = 60
CLIENTS = """
import asyncio, json, random, socket, sys
host, port, sessions, turns, tokens = sys.argv[1], *map(int, sys.argv[2:])
told = {"left": 0, "read": 0}

async def stream(key, messages, pause, leave_after):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": tokens})
    head = f"POST /v1/chat/completions HTTP/1.0\\r\\nAuthorization: Bearer {key}\\r\\n"
    writer.write(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    if leave_after:
        await asyncio.sleep(leave_after / 4)
        writer.transport.abort() if leave_after % 2 else writer.close()
        return None
    text = b""
    while some := await reader.read(700):
        text += some
        await asyncio.sleep(pause)
    writer.close()
    assert b" 200 " in text[:20] and b"[DONE]" in text, text[-300:]
    events = [json.loads(line[6:]) for line in text.split(b"\\n") if line.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])

async def session(number):
    draw = random.Random(number)
    messages = [{"role": "user", "content": f"0123456789{number}"}]
    for turn in range(turns):
        pause, text = draw.choice([0, 0.02, 0.1]), None
        if draw.random() < 0.3:
            text = await stream(f"s{number}", messages, pause, draw.randint(1, 6))
            told["left"] += text is None
        if text is None:
            text = await stream(f"s{number}", messages, pause, None)
        told["read"] += 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]

async def main():
    await asyncio.gather(*map(session, range(sessions)))
    print(json.dumps(told))

asyncio.run(main())
"""


@contextmanager
def engine(running: int) -> Iterator[tuple[str, Any]]:
    """The address of an embedded engine with a tiny model, and a tokenizer for it."""
    from slime.cli.quickstart import tiny
    from slime.engines.embedded.command import embedded_command
    from slime.engines.engine_process import EngineServer, LaunchPlan
    from slime.utils.machine import shm
    from slime.utils.machine.children import thread_environment
    from slime.utils.processing_utils import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model, prefix = Path(folder) / "model", shm.make_prefix()
        tiny.make_checkpoint(model, seed=0)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
        command = embedded_command(
            model_path=str(model),
            shm_prefix=prefix,
            device="cpu",
            dtype="float32",
            threads=1,
            max_running_requests=running,
            max_total_tokens=1 << 17,
            seed=0,
            await_weights=False,
        )
        log = Path(folder) / "engine.log"
        server = EngineServer(LaunchPlan("engine-0", command, thread_environment(1), log, 120.0))
        server.launch()
        try:
            server.wait_ready()
            tokenizer = load_tokenizer(str(model))
            tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            yield server.url, tokenizer
        finally:
            server.stop()
            shm.unlink_prefix(prefix)


class TimedPolicy(EnginePolicy):
    """Notes how long each abort took."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.aborts: list[float] = []

    async def abort(self, rid: str | None) -> None:
        started = time.monotonic()
        await super().abort(rid)
        self.aborts.append(time.monotonic() - started)


async def beat(lags: list[float]) -> None:
    while True:
        started = time.monotonic()
        await asyncio.sleep(0.05)
        lags.append(time.monotonic() - started - 0.05)


async def count_turns(adapter: AgentAdapter, sessions: int, turns: int) -> tuple[int, int]:
    """(sessions in which a turn is missing, turns beyond: they were written before their client left)."""
    missing = beyond = 0
    for number in range(sessions):
        samples = await adapter.finish_session(f"s{number}", base_sample=Sample(index=number), reward=1.0)
        more = sum(sum(sample.loss_mask or ()) for sample in samples) - turns * NUM_TOKENS
        missing += more < 0 or more % NUM_TOKENS != 0
        beyond += max(0, more // NUM_TOKENS)
    return missing, beyond


def told(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds) or [0.0]
    middle, late = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
    return f"{name}: median {middle:.2f} s, 99% within {late:.2f} s, longest {ordered[-1]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--running", type=int, default=64, help="requests that the engine computes at a time")
    options = parser.parse_args()
    sessions, turns, lags = options.sessions, options.turns, list[float]()
    with engine(options.running) as (url, tokenizer):
        policy = TimedPolicy(url)
        adapter = AgentAdapter(tokenizer, url, tool_parser="plain", policy=policy).start()
        assert adapter.handle is not None
        for number in range(sessions):
            adapter.open_session(f"s{number}", {"ignore_eos": True}, budget=Budget(max_new_tokens=NUM_TOKENS))
        beating = asyncio.run_coroutine_threadsafe(beat(lags), adapter.handle.loop)
        started, cpu = time.monotonic(), time.process_time()
        address = [adapter.handle.host, str(adapter.handle.port)]
        command = [sys.executable, "-c", CLIENTS, *address, str(sessions), str(turns), str(NUM_TOKENS)]
        clients = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        wall, cpu = time.monotonic() - started, time.process_time() - cpu
        missing, beyond = asyncio.run(count_turns(adapter, sessions, turns))
        beating.cancel()
        adapter.stop()
    print(
        f"{sessions} sessions, {clients['read']} turns read, {clients['left']} left in mid-answer, "
        f"{wall:.0f} s, adapter {cpu:.0f} s of CPU, load {os.getloadavg()[0]:.1f}"
    )
    print(told(f"aborts ({len(policy.aborts)})", policy.aborts))
    print(told("the adapter's event loop was late by", lags))
    print(f"sessions without one of their turns: {missing}; turns written before their client left: {beyond}")


if __name__ == "__main__":
    main()
    watch_exit()
