"""A function that holds up the event loop is named, while it lasts and
afterwards; others run as without the watch.
"""

import asyncio
import logging
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S, eventually

from slime.liveness import loop_watch as module
from slime.liveness.loop_watch import LoopWatch


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(module, "SLOW_STEP_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.05)
    return LoopWatch()


async def sleeps_without_await(seconds):
    await asyncio.sleep(0)
    time.sleep(seconds)
    return seconds


async def waits(seconds):
    await asyncio.sleep(seconds)
    return seconds


async def raises():
    await asyncio.sleep(0)
    raise KeyError("gold")


def test_a_step_that_lasts_is_named_once(watch, caplog, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", PATIENCE_S)  # it is told at its end, not while it lasts

    async def main():
        return [await watch.run("--custom-rm-path mine", sleeps_without_await(0.3)) for _ in range(2)]

    assert asyncio.run(main()) == [0.3, 0.3]
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert re.match(r"--custom-rm-path mine held up the event loop for \d+\.\d s: ", record.getMessage())


def test_waiting_holds_nothing_up(watch, caplog, monkeypatch):
    clock = [0.0]  # of the test alone: a busy machine may stop a step for a while
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=time.sleep))

    async def waits_for_an_hour():
        asyncio.get_running_loop().call_soon(clock.append, 3600.0)
        await asyncio.sleep(0)
        return clock[-1]

    assert asyncio.run(watch.run("fine", waits_for_an_hour())) == 3600.0
    assert not caplog.records


def test_it_is_named_with_its_line_while_it_lasts(watch, caplog):
    release = threading.Event()

    async def holds():
        release.wait(PATIENCE_S)

    thread = threading.Thread(target=lambda: asyncio.run(watch.run("--custom-rm-path mine", holds())))
    thread.start()
    try:
        eventually(lambda: "so far (now at " in caplog.text and "in wait" in caplog.text)
    finally:
        release.set()
        thread.join(PATIENCE_S)


def test_exceptions_and_cancellations_go_through(watch):
    with pytest.raises(KeyError, match="gold"):
        asyncio.run(watch.run("bad", raises()))

    async def main():
        task = asyncio.ensure_future(watch.run("slow", waits(60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await watch.run("slow", waits(60))

    asyncio.run(main())


def test_a_process_that_is_forked_has_a_watch_of_its_own():
    program = """
import asyncio, os, threading
from slime.liveness.loop_watch import loop_watch
async def one():
    return 1
names = lambda: [t.name for t in threading.enumerate()].count("loop-watch")
assert asyncio.run(loop_watch.run("mine", one())) == 1 and names() == 1
child = os.fork()
if child == 0:
    before = names()
    asyncio.run(loop_watch.run("mine", one()))
    os._exit(0 if (before, names()) == (0, 1) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
