"""Generate functions with sessions and tools whose calls have effects, and in which a run can crash."""

import asyncio
import contextlib
import shutil

import aiohttp

from slime.agent.adapters import adapter_of
from slime.agent.session import Session
from slime.agent.tools import BoxTools, ToolSet
from slime.rollout import episode_record
from slime.utils.errors import RunStopped

TURNS = 4
effects: list[str] = []
crash = {"at": None, "in_tool": False, "other_way": False, "lose": False}  # number of the turn
_crashed: list[asyncio.Event] = []


async def _act(turn: int) -> str:
    effects.append(f"step {turn}")
    if crash["at"] == turn and crash["in_tool"]:
        _crashed[-1].set()
        await asyncio.Event().wait()
    return f"result {turn}"


async def once(turn: int) -> str:
    """Does something."""
    return await _act(turn)


async def repeatable(turn: int) -> str:
    """Does something that may be done twice."""
    return await _act(turn)


repeatable.repeatable = True


class Counting:
    """A tool that counts in the process of the run."""

    def __init__(self):
        self.count = 0

    async def count_up(self, turn: int) -> str:
        """Counts."""
        self.count += 1
        return await _act(turn)


class CountingAgain(Counting):
    repeatable = True


class Saving(Counting):
    def save(self):
        return self.count

    def restore(self, state):
        self.count = state


async def generate(args, sample, sampling_params):
    """Four turns, each followed by a call of the tool that `sample.metadata` names."""
    name = sample.metadata["tool"]
    owner = {"Counting": Counting, "CountingAgain": CountingAgain, "Saving": Saving}.get(name, Counting)()
    tools = ToolSet([{"once": once, "repeatable": repeatable}.get(name) or owner.count_up])
    session = Session.of_run(args, sample, sampling_params)
    _crashed.append(asyncio.Event())
    messages = [{"role": "user", "content": str(sample.prompt)}]
    if crash["other_way"]:
        messages[0]["content"] += " again"
    for turn in range(TURNS):
        answer = await session.turn(messages)
        if crash["at"] == turn and not crash["in_tool"]:
            raise RunStopped("the crash, before the call")
        function = {"name": next(iter(tools.by_name)), "arguments": {"turn": turn}}
        call = {"id": f"{session.session_id}-{turn}", "type": "function", "function": function}
        [result] = await _or_crash(tools.answer([call]))
        messages += [answer.message, {"role": "user", "content": result["content"]}]
    return session.samples(sample, reward=float(owner.count), extra_metadata=tools.counts)


async def _or_crash(work):
    task, crashed = asyncio.ensure_future(work), asyncio.ensure_future(_crashed[-1].wait())
    await asyncio.wait({task, crashed}, return_when=asyncio.FIRST_COMPLETED)
    crashed.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    raise RunStopped("the crash, in the call")


async def in_a_sandbox(args, sample, sampling_params):
    """Four turns, each followed by a command that appends to a file of the sandbox."""
    async with BoxTools(args.sandbox) as box:
        tools = ToolSet([box.shell])
        session = Session.of_run(args, sample, sampling_params)
        _crashed.append(asyncio.Event())
        messages = [{"role": "user", "content": str(sample.prompt)}]
        for turn in range(TURNS):
            answer = await session.turn(messages)
            if crash["at"] == turn and not crash["in_tool"]:
                if crash["lose"]:
                    record = episode_record.current()
                    shutil.rmtree(record._ledger.files_of(record._origin))
                raise RunStopped("the crash, before the call")
            command = f"echo {turn} >> log; sleep 1000 >/dev/null 2>&1 & wc -l < log"
            if crash["in_tool"] and turn == 2:
                command = f"echo {turn} >> log; sleep 3"
            if crash["at"] == turn:
                asyncio.get_running_loop().call_later(0.5, _crashed[-1].set)
            call = {"id": f"{session.session_id}-{turn}", "type": "function"}
            call["function"] = {"name": "shell", "arguments": {"command": command}}
            [result] = await _or_crash(tools.answer([call]))
            messages += [answer.message, {"role": "user", "content": result["content"].replace("\n", " ")}]
        log = await (await box.box()).read_file("/work/log")
    return session.samples(sample, reward=float(len(log.split())), extra_metadata={"log": log})


async def impatient(args, sample, sampling_params):
    """Cancels a call that takes too long, and ends its episode without it."""
    session = Session.of_run(args, sample, sampling_params)
    await session.turn([{"role": "user", "content": str(sample.prompt)}])
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ToolSet([never_returns]).call("never_returns"), 0.1)
    return session.samples(sample, reward=1.0)


async def never_returns() -> str:
    """Waits."""
    await asyncio.Event().wait()


# Of an agent program: its messages, as far as it has got, and the addresses it has used.
program = {"outlives": False, "messages": [], "urls": set(), "statuses": []}


async def over_http(args, sample, sampling_params):
    """A program of four turns at the adapter; the run crashes after a response, which the program has got."""
    adapter = await adapter_of(args, port=crash["port"])
    program["urls"].add(adapter.url)
    key = sample.session_id
    if program["outlives"] and program["messages"]:  # its retry is here before its session is open again
        program["statuses"].append((await _post(adapter.url, program["key"], program["messages"]))[0])
    adapter.open_session(key, sampling_params)
    program["key"] = key
    if not program["outlives"]:
        program["messages"] = []
    messages = program["messages"] or [{"role": "user", "content": str(sample.prompt)}]
    for turn in range(sum(m["role"] == "assistant" for m in messages), TURNS):
        status, body = await _post(adapter.url, key, messages)
        assert status == 200, body
        text = body["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"on {turn}"}]
        program["messages"] = messages
        if crash["at"] == turn:
            adapter.drop_session(key)
            raise RunStopped("the crash")
    return await adapter.finish_session(key, base_sample=sample, reward=1.0, args=args)


async def _post(url, key, messages):
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        body = {"model": "m", "messages": messages}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()
