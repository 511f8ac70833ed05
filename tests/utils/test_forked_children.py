"""A child that a template forks is as one that `exec` started, and what cannot be forked is started so."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from patience import PATIENCE_S, eventually

from slime.utils import waits
from slime.utils.machine import warm_start
from slime.utils.machine.processes import import_environment, thread_environment
from slime.utils.machine.warm_start import WarmChild, warm_starts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")

PROGRAM = """
import json, os, signal, sys, time
LOADED_BY = os.getpid()

def main():
    words = sys.argv[1:]
    print(json.dumps({
        "words": words, "mine": os.environ.get("MINE"), "cwd": os.getcwd(), "parent": os.getppid(),
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


def test_a_template_that_is_stopped_is_waited_for_by_name_and_then_done_without(program, tmp_path):
    with warm_starts(["the_program"]):
        template = warm_start._template
        begin(program, tmp_path / "warm").wait(PATIENCE_S)  # it has imported what it is for
        template._process.send_signal(signal.SIGSTOP)
        template._socket.settimeout(1.0)
        asking = threading.Thread(target=lambda: begun.append(begin(program, tmp_path / "late")))
        begun: list = []
        asking.start()
        [wait] = eventually(lambda: [wait for wait in waits.active() if wait.target == "the template"])
        assert f"pid {template._process.pid}" in wait.name and wait.deadline_s is not None
        asking.join()
    assert (
        isinstance(begun[0], subprocess.Popen) and not facts_of(begun[0], tmp_path / "late")["loaded_before"]
    )


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
        assert facts["parent"] == os.getpid() and facts["leads"] and facts["sigint"] == interrupts
        facts["files"] = len(facts["files"])
        facts["words"][1] = "number"
    assert told["warm"] == told["cold"]


OWNER = """
import atexit, json, os, sys
from pathlib import Path
from slime.utils import waits
from slime.utils.machine import warm_start
from slime.utils.machine.processes import import_environment, thread_environment

sys.stdout.write("said before\\n")
atexit.register(lambda: os.write(1, b"bye\\n") if os.getpid() == OWNER else None)
OWNER, folder = os.getpid(), Path(sys.argv[1])
environment = {**os.environ, **thread_environment(1), **import_environment()}
environment["OMP_NUM_THREADS"] = "3"
with warm_start.warm_starts(["the_program"], own=["json"]):
    assert "the_program" in sys.modules and not {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & set(os.environ)
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", "-c", "from the_program import main; main()", "x" * 2000]
        child = warm_start.start(command, env=environment, log=log, pass_fds=[])
        assert type(child) is warm_start.WarmChild and child.wait(100) == 7
        begun = warm_start.start([*command, "sleep"], env=environment, log=log, pass_fds=[])
        shown = Path(f"/proc/{begun.pid}/cmdline").read_text
        while shown().rstrip("\\0").split("\\0") != [*command, "sleep"]:
            assert begun.poll() is None, "it ended"
        begun.kill()
        assert begun.wait(100) == -9
print(os.getpid(), warm_start._template, flush=True)  # what is not written yet would come behind the end
"""


def test_a_template_is_forked_from_an_owner_that_has_imported_the_same(program, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in thread_environment(1)}
    env |= import_environment()
    owner = subprocess.run(
        [sys.executable, "-P", "-c", OWNER, tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert owner.returncode == 0, owner.stderr
    said, last, bye = owner.stdout.splitlines()
    assert said == "said before" and last.endswith(" None") and bye == "bye"
    facts = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert facts["loaded_before"] and facts["parent"] == int(last.split()[0])
    assert facts["sigint"] == (signal.getsignal(signal.SIGINT) != signal.SIG_IGN)
    assert facts["words"] == ["x" * 2000] and len(facts["files"]) == 4  # one is of who looked


def test_signals_and_waits_are_those_of_a_child(program, tmp_path):
    with warm_starts([]):
        child = begin([*program, "sleep"], tmp_path / "log")
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
        child.kill()  # of one that has ended: nothing


def test_what_the_template_cannot_do_is_executed(program, tmp_path):
    with warm_starts(["the_program"]):
        other = begin(program, tmp_path / "other", HF_HOME="/elsewhere")
        assert (
            isinstance(other, subprocess.Popen) and not facts_of(other, tmp_path / "other")["loaded_before"]
        )
        code = begin([sys.executable, "-P", "-c", "raise SystemExit(7)"], tmp_path / "code")
        assert isinstance(code, subprocess.Popen) and code.wait(PATIENCE_S) == 7
        warm_start._template._process.kill()
        warm_start._template._process.wait()
        after = begin(program, tmp_path / "after")
        assert isinstance(after, subprocess.Popen) and facts_of(after, tmp_path / "after")["words"] == []


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
    assert warm_start._module_of([sys.executable, *words]) == module


def test_a_template_ends_with_its_owner(tmp_path):
    owner = (
        "from slime.utils.machine.warm_start import Template\n"
        "import time\n"
        "print(Template([])._process.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        template = int(process.stdout.readline())
        process.kill()
    eventually(lambda: not _runs(template))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
