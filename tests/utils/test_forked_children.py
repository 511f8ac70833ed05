"""A child of the fork server is like one that `exec` started, and what cannot be forked is started so."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

import psutil
import pytest
from patience import PATIENCE_S, eventually
from warm_start import real_processes

from slime.utils.machine import warm_start
from slime.utils.machine.children import import_environment, thread_environment
from slime.utils.machine.warm_start import WarmChild, warm_starts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")

PROGRAM = """
import json, os, signal, sys, time
LOADED_BY = os.getpid()

def main():
    words = sys.argv[1:]
    print(json.dumps({
        "words": words, "mine": os.environ.get("MINE"), "cwd": os.getcwd(),
        "leads": os.getsid(0) == os.getpid(), "loaded_before": LOADED_BY != os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    }), flush=True)
    if "--fd" in words:
        os.write(int(words[words.index("--fd") + 1]), b"hello")
    if "sleep" in words:
        time.sleep(1000)
    sys.exit(7)
"""


@pytest.fixture(autouse=True)
def real_interpreters():
    """The fork server under test is a process of its own, with this process's signals."""
    with real_processes():
        yield


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "the_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return [sys.executable, "-P", "-c", "from the_program import main; main()"]


def begin(command, log_path, fds=(), new_session=False, **variables):
    env = {**os.environ, **thread_environment(1), **import_environment(), **variables}
    with log_path.open("wb") as log:
        return warm_start.start(command, env=env, log=log, pass_fds=list(fds), start_new_session=new_session)


def facts_of(child, log_path):
    assert child.wait(PATIENCE_S) == child.returncode == child.poll() == 7
    return json.loads(log_path.read_text())


@pytest.fixture(params=["interrupted", "behind &"])
def interrupts(request):
    """Whether this process heeds them: what a shell starts with `&` does not."""
    heeds = request.param == "interrupted"
    before = signal.signal(signal.SIGINT, signal.default_int_handler if heeds else signal.SIG_IGN)
    yield heeds
    signal.signal(signal.SIGINT, before)


def test_a_warm_child_is_as_one_that_was_executed(program, interrupts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = {}
    for kind in ("warm", "cold"):
        read, write = os.pipe()
        words = [*program, "--fd", str(write), "x y"]
        if kind == "warm":
            with warm_starts(["the_program"]):
                child = begin(words, tmp_path / kind, [write], new_session=True, MINE="1")
                told[kind] = facts_of(child, tmp_path / kind)
            assert isinstance(child, WarmChild)
        else:
            child = begin(words, tmp_path / kind, [write], new_session=True, MINE="1")
            told[kind] = facts_of(child, tmp_path / kind)
            assert isinstance(child, subprocess.Popen)
        assert os.read(read, 5) == b"hello"
        os.close(read), os.close(write)
    assert told["warm"].pop("loaded_before") and not told["cold"].pop("loaded_before")
    for facts in told.values():
        assert facts["leads"] and facts["sigint"] == interrupts
        facts["files"] = len(facts["files"])
        facts["words"][1] = "number"
    assert told["warm"] == told["cold"]


def test_signals_and_waits_are_those_of_a_child(program, tmp_path):
    with warm_starts([]):
        child = begin([*program, "sleep"], tmp_path / "log")
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
        child.kill()  # of one that has ended: nothing


def test_what_the_fork_server_cannot_do_is_executed(program, tmp_path):
    with warm_starts(["the_program"]):
        code = begin([sys.executable, "-P", "-c", "raise SystemExit(7)"], tmp_path / "code")
        assert isinstance(code, subprocess.Popen) and code.wait(PATIENCE_S) == 7
        before = begin(program, tmp_path / "before")
        assert isinstance(before, WarmChild) and before.wait(PATIENCE_S) == 7
        server = psutil.Process(forkserver._forkserver._forkserver_pid)
        server.kill()
        eventually(lambda: server.status() == psutil.STATUS_ZOMBIE)
        after = begin(program, tmp_path / "after")
        assert facts_of(after, tmp_path / "after")["words"] == []


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["-P", "-m", "slime.engines.embedded", "--port", "0"], "slime.engines.embedded.__main__"),
        (["-P", "-m", "slime.engines.sglang.supervisor"], None),
        (["-P", "-m", "json.tool"], None),
        (["-m", "slime.engines.embedded"], None),
    ],
)
def test_only_packages_of_ours_are_started_by_their_main_function(words, module):
    assert warm_start.module_of([sys.executable, *words]) == module


def test_the_fork_server_ends_with_its_owner(tmp_path):
    owner = (
        "from multiprocessing import forkserver\n"
        "from slime.utils.machine.warm_start import warm_starts\n"
        "import time\n"
        "with warm_starts([]):\n"
        "    print(forkserver._forkserver._forkserver_pid, flush=True)\n"
        "    time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        process.kill()
    eventually(lambda: not _runs(server))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
