"""Loading plug-ins by path, shared segments, named waits, and HTTP with retries where they help."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web
from fake_engine import refused_url
from patience import LONG_S

from slime.engines.engine_process import hold_ports_in_a_row
from slime.liveness import waits
from slime.utils import async_utils, http_utils, misc
from slime.utils.machine import ports, shm
from slime.utils.machine.ports import hold_port, is_port_available


def test_functions_load_from_modules_and_from_files(tmp_path):
    assert misc.load_function("slime.utils.misc.group_by") is misc.group_by
    (tmp_path / "mine.py").write_text("def f():\n    return 7\n")
    assert misc.load_function(f"{tmp_path}/mine.py:f")() == 7


def test_a_missing_function_is_named_with_what_there_is(tmp_path):
    (tmp_path / "other.py").write_text("def g():\n    return 7\n")
    with pytest.raises(AttributeError, match="no 'f'; it defines g"):
        misc.load_function(f"{tmp_path}/other.py:f")


@pytest.mark.parametrize(
    "rollout_id, expected", [(0, False), (1, True), (3, True), (4, True), (6, False), (8, True), (9, True)]
)
def test_periodic_actions_run_at_intervals_epoch_ends_and_the_end(rollout_id, expected):
    assert misc.should_run_periodic_action(rollout_id, 2, 5, 9) is expected


def test_segments_are_shared_by_name_and_removed_by_prefix():
    prefix = shm.make_prefix()
    segment = shm.create_segment(64, prefix)
    segment.buffer[5] = 9
    assert shm.open_segment(segment.name).buffer[5] == 9
    assert shm.list_segments(prefix) == [segment.name]
    shm.unlink_prefix(prefix)
    assert shm.list_segments(prefix) == []


def test_segments_of_dead_drivers_are_removed_and_those_of_the_living_kept():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = shm.create_segment(8, f"slime-{gone.pid}-abc")
    mine = shm.create_segment(8, shm.make_prefix())
    assert stale.name in shm.unlink_stale()
    assert mine.path.exists()
    mine.unlink()


def test_segments_of_a_driver_that_is_not_seen_from_here_stay_while_it_holds_them():
    gone = subprocess.Popen([sys.executable, "-c", ""])  # as in a container with processes of its own
    gone.wait()
    prefix = f"slime-{gone.pid}-abd"
    release = shm.hold(prefix)
    segment = shm.create_segment(8, prefix)
    assert segment.name not in shm.unlink_stale() and segment.path.exists()
    release()
    assert segment.name in shm.unlink_stale()
    assert shm.list_segments(prefix) == []


def test_segments_of_another_user_keep_no_run_from_starting(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs = shm.create_segment(8, f"slime-{gone.pid}-abe")
    remove = Path.unlink

    def refuse(path, missing_ok=False):
        if path == theirs.path:
            raise PermissionError(1, "Operation not permitted", str(path))
        remove(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert theirs.name not in shm.unlink_stale()
    theirs.unlink()


def test_a_path_is_not_a_segment_name():
    with pytest.raises(ValueError, match="not the name"):
        shm.open_segment("../etc/passwd")


def test_a_wait_that_is_overdue_says_what_who_and_how_long():
    async def wait() -> None:
        async with waits.limited("the moon", 0.1, owner="me"):
            await asyncio.sleep(10)

    with pytest.raises(waits.WaitTimeout, match=r"the moon \(waited for by me\): not done after 0\.1 s"):
        async_utils.run(wait())
    assert not active_of("me")


def test_waits_in_progress_are_visible():
    with waits.waiting("engine", owner="a fleet", deadline_s=5):
        assert active_of("a fleet") == ["engine"]
    assert not active_of("a fleet")


def active_of(owner):
    """Of the waits in progress: a test before this one may have left a request that nobody answers."""
    return [wait.name for wait in waits.active() if wait.owner == owner]


async def serve(handler):
    app = web.Application()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


def call(statuses, **kwargs):
    """Post to a server that answers these statuses in turn; returns (result or error, number of requests)."""
    left, seen = list(statuses), []

    async def handler(request):
        seen.append(await request.json())
        status = left.pop(0)
        return web.json_response({"ok": True}, status=status)

    async def go():
        runner, url = await serve(handler)
        try:
            return await http_utils.post(url, {"x": 1}, **kwargs)
        except http_utils.HttpError as error:
            return error
        finally:
            await runner.cleanup()

    return async_utils.run(go()), len(seen)


def test_server_errors_are_retried():
    assert call([500, 503, 200]) == ({"ok": True}, 3)


def test_the_callers_mistakes_are_not_retried():
    error, count = call([400, 200])
    assert (error.status, count) == (400, 1)


def test_retries_end():
    error, count = call([500] * 5, max_retries=2)
    assert (error.status, count) == (500, 3)


def test_a_server_that_lives_and_fails_on_a_request_is_asked_a_few_times_and_told(monkeypatch, caplog):
    monkeypatch.setattr(http_utils, "_BACKOFF_CAP_S", 0.01)
    monkeypatch.setattr(http_utils, "_warned_at", float("-inf"))
    error, count = call([500] * 60)
    assert (error.status, count) == (500, 1 + http_utils._ANSWERED_RETRIES)
    assert caplog.text.count("the request is retried") == 1
    assert call([503] * 20 + [200]) == ({"ok": True}, 21)


def test_an_absent_server_is_an_error_with_its_address():
    url = refused_url()
    with pytest.raises(http_utils.HttpError, match=f"{url}.*no response after 2 attempts"):
        async_utils.run(http_utils.post(f"{url}/", {}, max_retries=1))


def test_a_server_that_comes_up_late_is_waited_for():
    held = hold_port("127.0.0.1")  # nobody else gets it meanwhile
    port = held.getsockname()[1]

    async def go():
        async def handler(request):
            return web.json_response({"late": True})

        async def start_late():
            await asyncio.sleep(0.5)
            app = web.Application()
            app.router.add_post("/", handler)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            return runner

        starting = asyncio.create_task(start_late())
        answer = await http_utils.post(f"http://127.0.0.1:{port}/", {})
        await (await starting).cleanup()
        return answer

    started = time.monotonic()
    assert async_utils.run(go()) == {"late": True}
    assert time.monotonic() - started < LONG_S
    held.close()


def test_ports_in_a_row_are_kept_for_a_server_and_given_to_nobody_else():
    one, other = (hold_ports_in_a_row("127.0.0.1", 14) for _ in range(2))
    numbers = [held.getsockname()[1] for held in one]
    assert numbers == [*range(numbers[0], numbers[0] + 14)]
    assert not set(numbers) & {held.getsockname()[1] for held in other}
    # As SGLang, ZeroMQ and torch bind them; a program that does not share an address is refused.
    assert all(is_port_available(number, host) for number in numbers for host in ("127.0.0.1", ""))
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", numbers[-1]))
    server = socket.create_server(("127.0.0.1", numbers[3]))
    assert hold_port("127.0.0.1", numbers[3]) is None
    for held in (server, *one, *other):
        held.close()


def test_a_machine_without_free_ports_in_a_row_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "hold_port", lambda host, port: None)
    with pytest.raises(OSError, match=r"no 14 free ports in a row between 20000 and \d+"):
        hold_ports_in_a_row("127.0.0.1", 14)
