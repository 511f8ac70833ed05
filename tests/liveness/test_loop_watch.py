"""Code that holds up an event loop is named while it lasts; a loop that only waits is not."""

import asyncio
import threading

import pytest
from patience import PATIENCE_S, eventually

from slime.liveness import loop_watch


@pytest.fixture
def slow_s():
    return 0.3


@pytest.fixture
def loop(monkeypatch, slow_s):
    monkeypatch.setattr(loop_watch, "_SLOW_S", slow_s)
    monkeypatch.setattr(loop_watch, "_LOOK_EVERY_S", 0.02)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    loop_watch.watch_loop(loop)
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)


def test_code_that_holds_the_loop_up_is_named_with_its_line(loop, caplog):
    release = threading.Event()

    async def holds():
        release.wait(PATIENCE_S)  # within threading.py: the line here is the one to tell

    task = asyncio.run_coroutine_threadsafe(holds(), loop)
    try:
        # On a busy machine other code may hold it up before: that line does not count.
        eventually(lambda: "holds (" in caplog.text)
    finally:
        release.set()
    task.result(PATIENCE_S)
    assert "has blocked the event loop" in caplog.text
    assert "test_loop_watch.py:" in caplog.text


@pytest.mark.parametrize("slow_s", [PATIENCE_S])  # a busy machine may stop the loop for a while
def test_waiting_holds_nothing_up(loop, caplog):
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.5), loop).result(PATIENCE_S)
    assert not caplog.records
