"""What does the adapter cost beside its client, and does a turn cost more when there were many before it?

1. Sessions of 8 turns against FakeInstantEngine, a process that computes nothing: CPU seconds of the
   adapter's process per turn against those of the client's own process (the openai package from
   .venv-agents, which `make agents-env` makes; without it a bare aiohttp client, and the output says so).
2. Python memory per open session beyond its tokens.
3. CPU time to build the prompt of a turn in a session of 200 turns against one of 10: of all, of the last;
   from the whole conversation, as chat clients send it, and from new messages alone (`turn(after=...)`).
4. The same behind HTTP: CPU time of the adapter's thread for a turn of a client that sends the whole
   conversation every time, as chat clients do, in sessions of 10 and of 200 turns.
5. With --engine: share of prompt tokens that the embedded engine finds in its prefix cache, tiny model.

    python benchmarks/agents.py [--sessions 1000] [--engine] [--json out.json]
"""

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import mean
from typing import Any

from aiohttp import web

from slime.agent.adapters import AgentAdapter
from slime.agent.engine_access import EnginePolicy, Made
from slime.agent.rendering import Renderer
from slime.agent.session import Budget, Session
from slime.liveness.stacks import watch_exit
from slime.utils import http_utils
from slime.utils.types import Sample

ROOT = Path(__file__).parent.parent
NUM_TURNS, NUM_TOKENS = 8, 32
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLIENT = """
import asyncio, json, sys, time
url, sessions, turns, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
START = "Be brief. " * 20

async def with_sdk():
    import openai
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    async def ask(key, messages):
        answer = await client.chat.completions.create(
            model="m", messages=messages, extra_headers={"Authorization": "Bearer " + key})
        return answer.choices[0].message.content
    return ask

async def with_aiohttp():
    import aiohttp
    http = aiohttp.ClientSession()
    async def ask(key, messages):
        headers = {"Authorization": "Bearer " + key}
        body = {"model": "m", "messages": messages}
        async with http.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]
    return ask

async def main():
    ask = await (with_sdk() if kind == "openai" else with_aiohttp())
    slots = asyncio.Semaphore(32)
    async def session(n):
        async with slots:
            messages = [{"role": "system", "content": START}, {"role": "user", "content": "begin"}]
            for turn in range(turns):
                text = await ask(f"s{n}", messages)
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": f"go on {turn}"})
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(session(n) for n in range(sessions)))
    print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - started}))

asyncio.run(main())
"""


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_start|>"
    )
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    fast.chat_template = TEMPLATE
    return fast


def answer_ids(tokenizer: Any) -> list[int]:
    text = "the quick brown fox jumps over the lazy dog "[: NUM_TOKENS - 1]
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def fake_instant_engine(pipe: Any, ids: list[int]) -> None:
    """Serve answers that are ready, until the process is ended."""
    triples = [[-0.5, token, None] for token in ids]
    finish = {"type": "stop", "matched": ids[-1]}
    meta = {"finish_reason": finish, "weight_version": "run:1", "output_token_logprobs": triples}
    whole = json.dumps({"text": "", "output_ids": ids, "meta_info": {"id": "x", **meta}}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=whole, content_type="application/json")

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def engine_process(tokenizer: Any) -> tuple[multiprocessing.Process, str]:
    """FakeInstantEngine and its address."""
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.Process(
        target=fake_instant_engine, args=(theirs, answer_ids(tokenizer)), daemon=True
    )
    engine.start()
    return engine, f"http://127.0.0.1:{ours.recv()}"


def adapter_against_client(sessions: int) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    engine, address = engine_process(tokenizer)
    adapter = AgentAdapter(tokenizer, address).start()
    sdk = ROOT / ".venv-agents" / "bin" / "python"
    kind, python = ("openai", str(sdk)) if sdk.exists() else ("aiohttp", sys.executable)
    for n in range(sessions):
        adapter.open_session(f"s{n}")
    try:
        cpu = time.process_time()
        command = [python, "-c", CLIENT, adapter.url, str(sessions), str(NUM_TURNS), kind]
        client = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        used = time.process_time() - cpu
        turns = sum(len(adapter.session(f"s{n}").turns) for n in range(sessions))
        assert turns == sessions * NUM_TURNS, turns
        (one,) = asyncio.run(adapter.finish_session("s0", base_sample=Sample(index=0)))
        assert sum(one.loss_mask) == NUM_TURNS * NUM_TOKENS
    finally:
        adapter.stop()
        engine.terminate()
        engine.join()
    return {
        "client": kind,
        "turns": turns,
        "turns_per_s": turns / client["wall_s"],
        "adapter_ms": 1e3 * used / turns,
        "client_ms": 1e3 * client["cpu_s"] / turns,
        "ratio": used / client["cpu_s"],
    }


def talk(adapter: AgentAdapter, key: str, num_turns: int) -> list[float]:
    """CPU seconds of the adapter's thread for each turn of one session."""
    adapter.open_session(key)
    handle = adapter.handle
    assert handle is not None and handle.thread.ident is not None
    clock = time.pthread_getcpuclockid(handle.thread.ident)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(handle.host, handle.port)
    messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "begin"}]
    times = []
    for turn in range(num_turns):
        body = json.dumps({"messages": messages, "model": "m"})
        started = time.clock_gettime(clock)
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
        times.append(time.clock_gettime(clock) - started)
        following = f"a question of some words, the {turn}th of them"
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": following})
    connection.close()
    adapter.drop_session(key)
    return times


def long_sessions(rounds: int = 5) -> dict[str, float]:
    """Mean over all turns, and over the last five, of sessions of 10 and of 200 turns, in turn."""
    tokenizer = byte_tokenizer()
    engine, address = engine_process(tokenizer)
    adapter = AgentAdapter(tokenizer, address).start()
    all_turns: dict[int, list[float]] = {10: [], 200: []}
    last_turns: dict[int, list[float]] = {10: [], 200: []}
    try:
        talk(adapter, "first", 20)
        for number in range(rounds):
            for length in (*[10] * 10, 200):
                times = talk(adapter, f"{number}-{length}", length)
                all_turns[length] += times
                last_turns[length] += times[-5:]
    finally:
        adapter.stop()
        engine.terminate()
        engine.join()
    return {
        "session_10_ms": 1e3 * mean(all_turns[10]),
        "session_200_ms": 1e3 * mean(all_turns[200]),
        "ratio": mean(all_turns[200]) / mean(all_turns[10]),
        "ratio_of_last_turns": mean(last_turns[200]) / mean(last_turns[10]),
    }


class InstantPolicy:
    """Answers in this process at once; the same tokens each time."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Made:
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "run:1",
            "prompt_tokens": len(prompt_ids),
        }
        spans = [{"version": "run:1", "start": 0, "end": len(self.ids)}]
        return Made(list(self.ids), [-0.5] * len(self.ids), spans, "stop", self.ids[-1], None, meta)


async def play(session: Session, num_turns: int, *, whole: bool = True) -> list[float]:
    """CPU seconds to build each prompt, from the whole conversation or from what is new behind an answer."""
    messages = [{"role": "user", "content": "begin"}]
    answer, times = None, []
    for turn in range(num_turns):
        started = time.process_time()
        asked = session.ask(messages, after=None if whole else answer)
        times.append(time.process_time() - started)
        made = await session.policy.generate(asked.prompt_ids, asked.sampling)
        answer = session.record(asked, made)
        following = {"role": "user", "content": f"a question of some words, the {turn}th of them"}
        messages = [*messages, answer.message, following] if whole else [following]
    return times


def prompt_cost(rounds: int = 30) -> dict[str, float]:
    """Mean over all turns, and over the last five, of sessions of 10 and of 200 turns, in turn."""
    tokenizer = byte_tokenizer()
    policy, renderer = InstantPolicy(answer_ids(tokenizer)), Renderer(tokenizer)
    kinds = [(length, whole) for whole in (True, False) for length in (10, 200)]
    means, lasts = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
    asyncio.run(play(Session(policy, renderer), 20))
    for _ in range(rounds):
        for length, whole in kinds:
            times = asyncio.run(play(Session(policy, renderer), length, whole=whole))
            means[length, whole] += 1e6 * sum(times) / length / rounds
            lasts[length, whole] += 1e6 * sum(times[-5:]) / 5 / rounds
    return {
        "session_10_us": means[10, True],
        "session_200_us": means[200, True],
        "ratio": means[200, True] / means[10, True],
        "ratio_of_last_turns": lasts[200, True] / lasts[10, True],
        "ratio_after": means[200, False] / means[10, False],
        "ratio_after_of_last_turns": lasts[200, False] / lasts[10, False],
    }


def memory(sessions: int = 200) -> dict[str, float]:
    tokenizer = byte_tokenizer()
    policy, renderer = InstantPolicy(answer_ids(tokenizer)), Renderer(tokenizer)
    asyncio.run(play(Session(policy, renderer), NUM_TURNS))
    gc.collect()
    tracemalloc.start()
    held = [Session(policy, renderer) for _ in range(sessions)]
    for session in held:
        asyncio.run(play(session, NUM_TURNS))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tokens = sum(4 * s.turns[-1].num_ids + 8 * s.num_sampled_tokens for s in held)
    return {"kib_beyond_tokens": (used - tokens) / sessions / 1024, "kib_tokens": tokens / sessions / 1024}


def prefix_cache(sessions: int = 8) -> dict[str, float]:
    """Sessions of 8 turns, four at a time, against an embedded engine with a tiny model."""
    from slime.cli.quickstart import tiny
    from slime.engines.embedded.command import embedded_command
    from slime.engines.engine_process import EngineServer, LaunchPlan
    from slime.utils.machine import shm
    from slime.utils.machine.children import thread_environment
    from slime.utils.processing_utils import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny.make_checkpoint(model, seed=0)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
        prefix = shm.make_prefix()
        command = embedded_command(
            model_path=str(model),
            shm_prefix=prefix,
            device="cpu",
            dtype="float32",
            threads=1,
            max_running_requests=4,
            max_total_tokens=1 << 15,
            seed=0,
            await_weights=False,
        )
        log = Path(folder) / "engine.log"
        server = EngineServer(LaunchPlan("engine-0", command, thread_environment(1), log, 120.0))
        server.launch()
        try:
            server.wait_ready()
            tokenizer = load_tokenizer(str(model))
            tokenizer.chat_template = (
                tokenizer.chat_template or "{% for m in messages %}{{ m.content }}{% endfor %}"
            )
            return asyncio.run(_hits(server.url, tokenizer, sessions))
        finally:
            server.stop()
            shm.unlink_prefix(prefix)


async def _hits(url: str, tokenizer: Any, sessions: int) -> dict[str, float]:
    policy, renderer = EnginePolicy(url), Renderer(tokenizer)
    found = asked = 0

    async def one(number: int) -> None:
        nonlocal found, asked
        session = Session(policy, renderer, sampling={"ignore_eos": True}, budget=Budget(max_new_tokens=24))
        messages = [{"role": "user", "content": "0123456789" * 4 + str(number)}]
        for _ in range(NUM_TURNS):
            answer = await session.turn(messages)
            found += int(answer.made.meta["cached_tokens"])
            asked += answer.num_prompt_tokens
            messages += [answer.message, {"role": "user", "content": "12"}]

    for start in range(0, sessions, 4):
        await asyncio.gather(*(one(n) for n in range(start, start + 4)))
    await http_utils.close_session()
    return {"hit_rate": found / asked}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--engine", action="store_true", help="also the prefix cache of the embedded engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    told: dict[str, Any] = {"memory": memory(), "prompt": prompt_cost()}
    told["long_sessions"] = long_sessions()
    told["http"] = adapter_against_client(options.sessions)
    if options.engine:
        told["prefix_cache"] = prefix_cache()
    beside = told["http"]
    print(
        f"CPU per turn: adapter {beside['adapter_ms']:.2f} ms, {beside['client']} client "
        f"{beside['client_ms']:.2f} ms: ratio {beside['ratio']:.2f} (at most 1.5); "
        f"{beside['turns']} turns, {beside['turns_per_s']:.0f}/s"
    )
    print(
        f"memory of a session beyond its tokens: {told['memory']['kib_beyond_tokens']:.1f} KiB (at most 50)"
    )
    prompt = told["prompt"]
    print(
        f"prompt of a turn: {prompt['session_10_us']:.0f} us in a session of 10, "
        f"{prompt['session_200_us']:.0f} us in one of 200: ratio {prompt['ratio']:.2f} (at most 1.3); "
        f"of their last turns {prompt['ratio_of_last_turns']:.2f}; with `after` alone "
        f"{prompt['ratio_after']:.2f} and {prompt['ratio_after_of_last_turns']:.2f}"
    )
    long = told["long_sessions"]
    print(
        f"a turn behind HTTP, all of it sent: {long['session_10_ms']:.2f} ms in a session of 10, "
        f"{long['session_200_ms']:.2f} ms in one of 200: ratio {long['ratio']:.2f} (at most 4); of their "
        f"last turns {long['ratio_of_last_turns']:.2f}"
    )
    if options.engine:
        print(f"prefix cache: {told['prefix_cache']['hit_rate']:.3f} of prompt tokens (at least 0.9)")
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
    watch_exit()
