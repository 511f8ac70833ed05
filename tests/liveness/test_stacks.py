"""A process writes where it stands when it is asked; one that would die of the question is not asked."""

import signal
import subprocess
import sys
import time

import pytest
from patience import PATIENCE_S, eventually

from slime.liveness import stacks

ANSWERS = """
import asyncio, threading
from slime.utils import async_utils
from slime.liveness import stacks
stacks.answer_signal()

async def the_task_that_waits():
    await asyncio.Event().wait()

def the_thread_that_hangs():
    threading.Event().wait()

threading.Thread(target=the_thread_that_hangs, daemon=True).start()
threading.Thread(target=lambda: async_utils.run(the_task_that_waits()), daemon=True).start()
print("up", flush=True)
while True:
    threading.Event().wait(1000)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(code):
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)
        started.append(process)
        eventually(lambda: "up" in (tmp_path / "log").read_text())
        return process, tmp_path / "log"

    yield begin
    for process in started:
        process.kill()
        process.wait(PATIENCE_S)


def test_threads_and_tasks_are_in_the_log_and_the_process_goes_on(start):
    process, log = start(ANSWERS)

    def said_of_the_task():
        assert stacks.ask([process.pid]) == [process.pid]
        time.sleep(0.1)
        return log.read_text() if "the_task_that_waits" in log.read_text() else None

    said = eventually(said_of_the_task)
    assert "in the_thread_that_hangs" in said and "asyncio tasks: 1" in said
    assert process.poll() is None


def test_a_process_that_the_signal_would_end_is_not_asked(start):
    process, _ = start("import time; print('up', flush=True); time.sleep(1000)")
    assert stacks.ask([process.pid, 2**22 - 1]) == []
    assert process.poll() is None


def test_the_processes_below_one_are_asked_with_it(start):
    process, log = start(ANSWERS)
    eventually(lambda: process.pid in stacks.ask_children() and "the_thread_that_hangs" in log.read_text())


def test_a_driver_that_is_asked_writes_to_its_log_and_goes_on(tmp_path):
    log = tmp_path / "driver.log"
    with stacks.answering(log):
        signal.raise_signal(stacks.SIGNAL)
    said = log.read_text()
    assert "in test_a_driver_that_is_asked_writes_to_its_log_and_goes_on" in said
    assert signal.getsignal(stacks.SIGNAL) == signal.SIG_DFL


def test_a_handler_that_somebody_has_set_stays(tmp_path):
    asked = []
    signal.signal(stacks.SIGNAL, lambda number, frame: asked.append(number))
    try:
        with stacks.answering(tmp_path / "driver.log"):
            signal.raise_signal(stacks.SIGNAL)
    finally:
        signal.signal(stacks.SIGNAL, signal.SIG_DFL)
    assert asked == [stacks.SIGNAL]


NEVER_ENDS = """
import sys, threading
from slime.liveness.stacks import watch_exit

def the_thread_that_keeps_the_exit():
    sys.stdin.read()

threading.Thread(target=the_thread_that_keeps_the_exit).start()
watch_exit(0.2)
"""


def test_an_exit_that_is_stuck_writes_its_stacks():
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NEVER_ENDS], **pipes) as process:
        said = ""
        # The main thread's stack comes last: an exit amid the dump would free what the dump reads.
        while "_shutdown" not in said and (line := process.stderr.readline()):
            said += line
        process.stdin.close()
        process.stderr.read()
    assert "the_thread_that_keeps_the_exit" in said and process.returncode == 0
