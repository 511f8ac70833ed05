"""A process that tests fork from a template is what a new interpreter would have been."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest
import warm_start
from patience import PATIENCE_S, eventually

# The name of the file is one that a template starts.
LOOK = """
import json, os, pathlib, random, signal, subprocess, sys

fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[name] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass  # of the listing itself
facts = {
    "is_child": os.getppid() == int(sys.argv[1]),
    "leads_session": os.getsid(0) == os.getpid(),
    "arguments": sys.argv,
    "shown": [word for word in pathlib.Path("/proc/self/cmdline").read_text().split("\\0") if word],
    "folder": os.getcwd(),
    "environment": dict(sorted(os.environ.items())),
    "files": sorted(name for name, target in fds.items() if int(name) < 3 or "pipe" in target),
    "name": __name__,
    "is_main": sys.modules["__main__"].__file__ == __file__,
    "path": sys.path,
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding],
    "heard": sys.stdin.read(),
}
print(json.dumps(facts), flush=True)
print("an error", file=sys.stderr)
print("warm" if "transformers" in sys.modules else "new", flush=True)
if sys.argv[2:] == ["nest"]:
    here = str(pathlib.Path(__file__))
    subprocess.run([sys.executable, here, str(os.getpid())], input="", text=True)
    sys.exit(0)
sys.exit(3)
"""
WAIT = "import time\nprint('there', flush=True)\ntime.sleep(3600)\n"


@pytest.fixture(autouse=True)
def interruptible():
    """A shell that starts the tests in the background has them ignore SIGINT, and new processes with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOK)
    return path


def look(script, *words, **options):
    command = [sys.executable, str(script), str(os.getpid()), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, input="said", **options
    )
    facts, *rest = done.stdout.splitlines()
    return json.loads(facts), rest, done


def test_a_warm_process_sees_what_a_new_one_sees(script, tmp_path):
    read_end, write_end = os.pipe()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = {
        "cwd": elsewhere,
        "pass_fds": [read_end],
        "start_new_session": True,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "A_NAME": "ä value", "PYTHONPATH": str(tmp_path)},
    }
    with warm_start.real_processes():
        expected, [new], done = look(script, "a b", "", **options)
    assert (new, done.returncode, done.stderr) == ("new", 3, "an error\n")
    facts, [warm], done = look(script, "a b", "", **options)
    assert (warm, done.returncode, done.stderr) == ("warm", 3, "an error\n")
    assert facts == expected
    assert facts["is_child"] and facts["leads_session"] and facts["heard"] == "said"
    assert sorted(map(int, facts["files"])) == [0, 1, 2, read_end]
    os.close(read_end)
    os.close(write_end)


def test_the_processes_that_a_warm_process_starts_are_warm_and_its_children(script):
    facts, rest, done = look(script, "nest")
    inner = json.loads(rest[1])
    assert done.returncode == 0 and rest[0] == rest[2] == "warm"
    assert facts["is_child"] and inner["is_child"]


def test_a_warm_process_is_killed_and_its_template_goes_with_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WAIT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"
        [template] = psutil.Process(process.pid).children(recursive=True)
        eventually(lambda: " ".join(template.cmdline()).strip() == "template")
    finally:
        process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert process.stdout.read() == "", "nobody else holds the pipe"
    eventually(lambda: not template.is_running())


def report(queue):
    queue.put((os.getppid(), "transformers" in sys.modules))


def test_a_function_in_a_spawned_process_runs_warm():
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    assert queue.get() == (os.getpid(), True)
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def test_another_environment_for_imports_and_unknown_programs_get_new_interpreters(script):
    _, rest, _ = look(script, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert rest == ["new"]
    other = script.rename(script.with_name("other.py"))
    _, rest, _ = look(other)
    assert rest == ["new"]
