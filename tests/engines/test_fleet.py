"""Engine processes: started, watched, restarted on their port, given up if they keep dying, ended."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import LONG_S, PATIENCE_S, eventually

from slime.engines import engine_process as engine_server
from slime.engines.engine_process import EngineServer, LaunchPlan, MachineLost
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.liveness.waits import WaitTimeout
from slime.utils.errors import RunStopped

SCRIPT = Path(__file__).parents[1] / "support" / "fake_engine_process.py"


class Fleet:
    """A fleet of fakes, what joined it, and the mood of its engines."""

    def __init__(self, folder: Path, size: int = 1, limit: int = 3, timeout_s: float = PATIENCE_S, **policy):
        self.mood = folder / "mood"
        self.set_mood("well")
        self.joined: list[str] = []
        self.servers = [EngineServer(self._plan(folder, i, timeout_s)) for i in range(size)]
        policy = WatchPolicy(limit, 600.0, poll_s=0.02, **policy)
        self.fleet = EngineFleet(self.servers, policy)
        self.fleet.keep_current(lambda: None, self.on_join)
        self.fail_join = False
        self.on_join_probe = lambda: None

    def _plan(self, folder: Path, index: int, timeout_s: float) -> LaunchPlan:
        def command(port: int, ready: Path, life_fd: int) -> list[str]:
            return [sys.executable, str(SCRIPT), str(port), str(ready), str(life_fd), str(self.mood)]

        return LaunchPlan(f"engine-{index}", command, {}, folder / f"engine-{index}.log", timeout_s)

    def set_mood(self, mood: str) -> None:
        # Renamed into place: an engine never reads half a word.
        temporary = self.mood.with_suffix(".tmp")
        temporary.write_text(mood)
        temporary.rename(self.mood)

    def on_join(self, url: str) -> None:
        self.joined.append(url)
        self.on_join_probe()
        if self.fail_join:
            raise RuntimeError("it refused the weights")

    def start(self) -> tuple[str, ...]:
        self.fleet.launch()
        return self.fleet.wait_ready()

    def kill(self, index: int = 0) -> int:
        pid = self.servers[index].pid
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture
def make(tmp_path):
    made: list[Fleet] = []

    def build(**options) -> Fleet:
        made.append(Fleet(tmp_path, **options))
        return made[-1]

    yield build
    for fleet in made:
        fleet.fleet.stop()


def test_engines_report_the_ports_they_bound(make):
    fleet = make(size=2)
    urls = fleet.start()
    assert len(set(urls)) == 2 and all(
        url.startswith("http://127.0.0.1:") and not url.endswith(":0") for url in urls
    )


class Rotating(list):
    """A rotation: the addresses that get requests."""

    def add(self, server):
        self.append(server.url)

    def remove(self, url):
        if url in self:
            super().remove(url)


def test_an_engine_joins_with_the_current_weights_and_another_leaves_for_good(make, tmp_path):
    fleet, rotation = make(size=1), Rotating()
    [first] = fleet.start()
    fleet.fleet.follow(rotation)
    rotation.add(fleet.servers[0])
    newcomer = EngineServer(fleet._plan(tmp_path, 7, PATIENCE_S))
    newcomer.launch()
    served_before = []
    fleet.on_join_probe = lambda: served_before.append((list(rotation), fleet.fleet.is_alive(newcomer.url)))
    fleet.fleet.admit(newcomer)
    assert fleet.joined == [newcomer.url] and served_before == [([first], False)]
    assert rotation == [first, newcomer.url] and fleet.fleet.is_alive(newcomer.url)
    fleet.fleet.dismiss(fleet.servers[0])
    assert rotation == [newcomer.url] and fleet.fleet.urls == (newcomer.url,)
    assert not fleet.servers[0].alive() and fleet.fleet.num_restarts == 0
    newcomer_pid = newcomer.pid
    os.kill(newcomer_pid, signal.SIGKILL)  # watched as the others are
    eventually(lambda: fleet.fleet.num_restarts == 1)
    assert rotation == [newcomer.url] and newcomer.pid != newcomer_pid


def test_an_engine_that_refuses_the_weights_does_not_join(make, tmp_path):
    fleet = make(size=1)
    urls = fleet.start()
    newcomer = EngineServer(fleet._plan(tmp_path, 7, PATIENCE_S))
    newcomer.launch()
    fleet.fail_join = True
    with pytest.raises(RuntimeError, match="it refused the weights"):
        fleet.fleet.admit(newcomer)
    newcomer.stop()
    assert fleet.fleet.urls == urls and fleet.fleet.num_restarts == 0


def test_a_dead_engine_comes_back_on_its_port_and_is_brought_up_to_date(make):
    fleet = make(size=2)
    urls = fleet.start()
    old = fleet.kill(1)
    eventually(lambda: fleet.fleet.num_restarts == 1)
    assert fleet.fleet.urls == urls
    assert fleet.joined == [urls[1]]
    assert fleet.servers[1].alive() and fleet.servers[1].pid != old


def test_a_stopped_engine_is_replaced(make, caplog):
    fleet = make(size=2, silence_limit_s=2.0)
    urls = fleet.start()
    old = fleet.servers[1].pid
    os.kill(old, signal.SIGSTOP)
    eventually(lambda: fleet.servers[1].pid not in (None, old) and fleet.fleet.is_alive(urls[1]))
    assert fleet.fleet.urls == urls and fleet.fleet.num_restarts >= 1
    assert "no sign of life for 2 s: its process is stopped (SIGSTOP" in caplog.text


def test_an_engine_that_computes_is_not_replaced_although_it_is_silent(make):
    fleet = make(silence_limit_s=1.0)
    fleet.start()
    fleet.set_mood("spins")
    [watched] = fleet.fleet._heartbeats._watched.values()
    clock = watched.clock
    eventually(lambda: clock.silent_s > 2.0)
    fleet.set_mood("well")
    eventually(lambda: clock.silent_s == 0.0)
    assert fleet.fleet.num_restarts == 0 and fleet.servers[0].alive()


def test_an_engine_that_is_asleep_owes_no_sign_of_life(make):
    fleet = make(silence_limit_s=0.2)
    fleet.fleet.asleep = True
    fleet.start()
    os.kill(fleet.servers[0].pid, signal.SIGSTOP)
    time.sleep(1.0)
    assert fleet.fleet.num_restarts == 0 and fleet.servers[0].alive()
    os.kill(fleet.servers[0].pid, signal.SIGCONT)


def test_more_deaths_than_the_limit_end_the_run_with_the_cause(make):
    fleet = make(limit=1)
    fleet.start()
    fleet.kill()
    eventually(lambda: fleet.fleet.num_restarts == 1)
    fleet.kill()
    with pytest.raises(
        RunStopped, match=r"died 2 times within 600 s \(--limits engine-restarts=1\).*signal 9"
    ):
        fleet.fleet.failure.result(PATIENCE_S)


def test_the_others_go_on_when_a_machine_is_lost(make):
    fleet = make(size=2, no_engine_timeout_s=0.3)
    urls = fleet.start()

    def lost() -> None:
        raise MachineLost("no answer from 10.0.0.9")

    for server in fleet.servers:
        server.launch = lost
    fleet.kill(1)
    eventually(lambda: fleet.servers[1] in fleet.fleet._out)
    with fleet.fleet.frozen() as there:
        assert there == [urls[0]] and not fleet.fleet.failure.done()
    fleet.kill(0)
    with pytest.raises(RunStopped, match=r"the last to go: engine-0 was killed by signal 9"):
        fleet.fleet.failure.result(PATIENCE_S)


def test_an_engine_of_a_lost_machine_returns_with_it(make, monkeypatch, caplog):
    monkeypatch.setattr("slime.engines.fleet._MACHINE_POLL_S", 0.05)
    fleet = make(size=2)
    urls = fleet.start()
    server, launches = fleet.servers[1], []
    start = server.launch

    def lost_for_a_while() -> object:
        launches.append("")
        if len(launches) < 4:
            raise MachineLost("no answer from 10.0.0.9")
        return start()

    server.launch = lost_for_a_while
    fleet.kill(1)
    eventually(lambda: fleet.fleet.num_restarts == 1)
    assert fleet.fleet.is_alive(urls[1]) and fleet.fleet.urls == urls
    assert caplog.text.count("the run continues with the other engines until its machine is back") == 1


def test_lost_machines_do_not_count_as_deaths_of_engines(make, monkeypatch):
    monkeypatch.setattr("slime.engines.fleet._MACHINE_POLL_S", 0.05)
    fleet = make(size=2, limit=1)
    fleet.start()
    server = fleet.servers[1]
    start, launches = server.launch, []

    def lost_at_first() -> object:
        launches.append("")
        if len(launches) % 2:
            raise MachineLost("no answer from 10.0.0.9")
        return start()

    server.launch = lost_at_first
    for returns in range(1, 4):
        fleet.kill(1)
        eventually(lambda returns=returns: fleet.fleet.num_restarts == returns)
    assert not fleet.fleet.failure.done()


def test_an_engine_that_cannot_start_again_counts_as_dying(make):
    fleet = make(limit=2)
    fleet.start()
    fleet.set_mood("dies")
    fleet.kill()
    with pytest.raises(RunStopped, match=r"(?s)ended with code 1.*the model folder is empty"):
        fleet.fleet.failure.result(PATIENCE_S)


def test_an_engine_that_dies_before_it_serves_is_told_with_its_last_words(make):
    fleet = make()
    fleet.set_mood("dies")
    with pytest.raises(RunStopped, match=r"(?s)engine-0 ended with code 1; .*the model folder is empty"):
        fleet.start()


def test_an_engine_that_never_serves_is_a_named_timeout(make):
    fleet = make(timeout_s=0.5)
    fleet.set_mood("silent")
    with pytest.raises((WaitTimeout, RunStopped), match=r"start of engine-0 .*not done after 0\.5 s"):
        fleet.start()


def test_a_port_that_is_free_only_after_a_while_is_waited_for(make):
    fleet = make()
    [url] = fleet.start()
    with fleet.fleet.frozen():
        fleet.kill()
        eventually(lambda: not fleet.servers[0].alive())
        slow = socket.create_server(("127.0.0.1", int(url.rpartition(":")[2])))
    time.sleep(2.5)  # a child of the engine, say, that the kernel has not ended yet
    assert fleet.joined == [] and not fleet.fleet.failure.done()
    slow.close()
    eventually(lambda: fleet.joined == [url])


def test_a_port_taken_while_the_engine_was_down_is_told_and_nothing_hangs(make, monkeypatch):
    monkeypatch.setattr(engine_server, "_PORT_PATIENCE_S", 0.5)
    fleet = make()
    [url] = fleet.start()
    port = int(url.rpartition(":")[2])
    with fleet.fleet.frozen():  # the watch waits, so that we can be faster
        fleet.kill()
        eventually(lambda: not fleet.servers[0].alive())
        thief = socket.create_server(("127.0.0.1", port))
    try:
        with pytest.raises(RunStopped, match=rf"port {port} of engine-0 was taken"):
            fleet.fleet.failure.result(PATIENCE_S)
    finally:
        thief.close()


def test_nobody_gets_the_port_by_chance_while_the_engine_is_down(make):
    fleet = make()
    [url] = fleet.start()
    port = int(url.rpartition(":")[2])
    with fleet.fleet.frozen():
        fleet.kill()
        eventually(lambda: not fleet.servers[0].alive())
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as a connection does, whose number the system chooses
    eventually(lambda: fleet.joined == [url])


def test_another_address_of_the_machine_may_use_the_number_of_its_port(make):
    fleet = make()
    [url] = fleet.start()
    with socket.create_server(("127.0.0.2", int(url.rpartition(":")[2]))):
        fleet.kill()
        eventually(lambda: fleet.fleet.failure.done() or fleet.joined == [url])
    assert not fleet.fleet.failure.done()


def test_nobody_joins_while_membership_is_frozen(make):
    fleet = make(size=2)
    urls = fleet.start()
    with fleet.fleet.frozen():
        fleet.kill(0)
        time.sleep(0.3)
        assert fleet.joined == []
    eventually(lambda: fleet.joined == [urls[0]])
    with fleet.fleet.frozen() as alive:
        assert alive == list(urls)


def test_an_evicted_engine_is_killed_and_comes_back(make):
    fleet = make()
    [url] = fleet.start()
    old = fleet.servers[0].pid
    fleet.fleet.evict(url, RuntimeError("wrong checksum"))
    eventually(lambda: fleet.fleet.num_restarts == 1)
    assert fleet.servers[0].pid != old and fleet.joined == [url]


def test_the_cause_of_an_eviction_is_behind_the_end_of_the_run(make):
    fleet = make(limit=1)
    fleet.start()
    fleet.fail_join = True
    fleet.kill()
    with pytest.raises(RunStopped) as stopped:
        fleet.fleet.failure.result(PATIENCE_S)
    assert "it refused the weights" in str(stopped.value.__cause__)


def test_an_engine_that_fails_its_health_question_is_replaced(make):
    fleet = make(probe_interval_s=0.05, probe_timeout_s=LONG_S)
    fleet.start()
    old = fleet.servers[0].pid
    fleet.set_mood("sick")
    eventually(lambda: not psutil.pid_exists(old) or fleet.servers[0].pid != old)
    fleet.set_mood("well")
    eventually(lambda: fleet.fleet.num_restarts >= 1)


def test_an_engine_that_lost_its_weights_is_replaced_by_name(make, caplog):
    fleet = make(probe_interval_s=0.05, probe_timeout_s=LONG_S)
    fleet.fleet.keep_current(lambda: "well", fleet.on_join)
    fleet.start()
    old = fleet.servers[0].pid
    time.sleep(0.3)
    assert fleet.servers[0].pid == old
    fleet.set_mood("default")  # as after a restart that nobody saw
    eventually(lambda: not psutil.pid_exists(old) or fleet.servers[0].pid != old)
    fleet.set_mood("well")
    eventually(lambda: fleet.fleet.num_restarts >= 1)
    assert "engine-0 is removed from the fleet: it has weights default, but the run is at well" in caplog.text


def test_stopping_leaves_no_process(make):
    fleet = make(size=2)
    fleet.start()
    pids = fleet.fleet.pids
    fleet.fleet.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


class Rotation:
    """Writes down who leaves and who returns."""

    def __init__(self):
        self.events: list[tuple[str, str]] = []

    def add(self, server) -> None:
        self.events.append(("back", server.url))

    def remove(self, url: str) -> None:
        self.events.append(("out", url))


def test_an_engine_leaves_the_rotation_at_once_and_returns_after_it_is_up_to_date(make):
    fleet, rotation = make(size=2), Rotation()
    urls = fleet.start()
    fleet.fleet.follow(rotation)
    joined_at = []
    fleet.on_join_probe = lambda: joined_at.append(list(rotation.events))
    fleet.kill(0)
    eventually(lambda: ("back", urls[0]) in rotation.events)
    assert rotation.events[0] == ("out", urls[0]) and fleet.joined == [urls[0]]
    assert joined_at == [[event for event in rotation.events if event[0] == "out"]]
    assert ("out", urls[1]) not in rotation.events


def test_an_engine_that_dies_while_the_watch_waits_for_a_push_leaves_the_rotation_too(make):
    """Else it gets requests as soon as its port is open, before it has the weights of the run."""
    fleet, rotation = make(size=2), Rotation()
    urls = fleet.start()
    fleet.fleet.follow(rotation)
    dead, checks = fleet.fleet._dead, []

    def checked() -> list:
        found = dead()
        checks.append(found)
        return found

    with fleet.fleet.frozen():
        fleet.fleet._dead = checked
        eventually(lambda: checks)
        assert checks == [[]]  # the last check before the watch waits
        fleet.kill(0)
        eventually(lambda: not fleet.servers[0].alive())
    eventually(lambda: ("back", urls[0]) in rotation.events)
    assert rotation.events == [("out", urls[0]), ("back", urls[0])]


def test_the_others_are_pushed_to_while_one_restarts(make):
    fleet = make(size=2)
    urls = fleet.start()
    fleet.set_mood("silent")  # the one that starts now does not serve for long
    fleet.kill(0)
    eventually(lambda: not fleet.fleet.is_alive(urls[0]))
    time.sleep(0.2)
    with fleet.fleet.frozen() as present:  # a push does not wait for it
        assert present == [urls[1]]
    assert fleet.fleet.is_alive(urls[1]) and fleet.joined == []


def test_no_engine_left_for_too_long_ends_the_run_with_the_cause(make):
    fleet = make(size=2, no_engine_timeout_s=0.5)
    fleet.start()
    fleet.set_mood("silent")
    fleet.kill(0)
    fleet.kill(1)
    with pytest.raises(
        RunStopped,
        match=r"(?s)no engine was left for 0\.5 s \(--timeouts no-engine\).*engine-\d was killed",
    ):
        fleet.fleet.failure.result(PATIENCE_S)


def test_one_engine_left_is_enough(make):
    fleet = make(size=2, no_engine_timeout_s=0.3)
    fleet.start()
    fleet.set_mood("silent")
    fleet.kill(0)
    time.sleep(1.0)
    assert not fleet.fleet.failure.done()


def test_a_probe_must_fail_as_often_as_it_is_told(make):
    fleet = make(probe_interval_s=0.05, probe_timeout_s=LONG_S, probe_failures=1000)
    fleet.start()
    old = fleet.servers[0].pid
    fleet.set_mood("sick")
    time.sleep(0.6)
    assert fleet.servers[0].pid == old and fleet.servers[0].alive()


def test_engines_without_their_memory_are_neither_asked_nor_restarted_until_they_wake(make):
    fleet = make(probe_interval_s=0.05, probe_timeout_s=LONG_S)
    fleet.fleet.asleep = True
    fleet.start()
    fleet.set_mood("sick")
    pid = fleet.servers[0].pid
    time.sleep(0.5)
    assert fleet.servers[0].pid == pid and fleet.servers[0].alive()
    fleet.set_mood("well")
    fleet.kill()
    time.sleep(0.5)
    assert fleet.joined == []
    fleet.fleet.asleep = False
    eventually(lambda: fleet.joined)
