"""What the system says of a silent process, and how much patience that earns."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import eventually

from slime.liveness.vital_signs import Signs, SilenceClock, signs_of, signs_of_group

STILL = Signs(stopped=False, held=False, cpu_s=5.0)
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="signs are read from /proc")


def silent(clock: SilenceClock, seconds: int, signs) -> None:
    for second in range(seconds):
        clock.miss(1.0, signs(second) if callable(signs) else signs)


@pytest.mark.parametrize(
    ("signs", "allowed_s", "cause"),
    [
        (STILL, 10, "does nothing: it hangs"),
        (Signs(True, False, 5.0), 10, r"stopped \(SIGSTOP"),
        (Signs(True, True, 5.0), 10, "stopped"),
        (Signs(False, True, 5.0), 120, "waits for a disk, or for a debugger"),
        (lambda second: Signs(False, False, 5.0 + 0.1 * second), 120, "computes and does not answer"),
        (lambda second: Signs(False, False, 5.0 + 0.001 * second), 10, "hangs"),
        (lambda second: Signs(False, False, 5.0, wants_core=second % 4 > 0), 120, "waits for a core"),
        (lambda second: Signs(False, False, 5.0, wants_core=second % 4 == 0), 10, "hangs"),
        (None, 30, "nothing is known"),
    ],
)
def test_patience_depends_on_what_is_seen(signs, allowed_s, cause):
    clock = SilenceClock(10.0, 2.0)
    silent(clock, allowed_s - 1, signs)
    assert not clock.is_overdue
    silent(clock, 1, signs if not callable(signs) else lambda _: signs(allowed_s))
    assert clock.is_overdue
    assert re.search(cause, clock.describe())


def test_an_answer_ends_the_silence_and_time_in_which_the_asker_slept_is_not_counted():
    clock = SilenceClock(10.0, 2.0)
    clock.miss(1000.0, STILL)
    assert clock.silent_s == 2.0
    silent(clock, 7, STILL)
    clock.hear()
    silent(clock, 9, STILL)
    assert not clock.is_overdue


@pytest.fixture
def family():
    """A process that leads a group, and a child of it in that group."""
    code = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process, int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_stopped_process_is_seen_also_among_the_workers_of_a_group(family):
    leader, child = family
    eventually(lambda: not signs_of_group(leader.pid).stopped)
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: signs_of([child]).stopped)
    assert signs_of_group(leader.pid).stopped
    assert not signs_of([leader.pid]).stopped
    os.kill(child, signal.SIGCONT)
    eventually(lambda: not signs_of_group(leader.pid).stopped)


def test_cpu_time_counts_and_what_is_gone_has_no_signs():
    first = signs_of([os.getpid()]).cpu_s
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    assert signs_of([os.getpid()]).cpu_s > first
    assert signs_of([2**22 + 5]) is None and signs_of_group(2**22 + 5) is None


def test_the_thread_that_looks_is_no_sign_of_life():
    """It runs while it looks: a process that watches itself would always seem to want a core."""
    eventually(lambda: not signs_of([os.getpid()]).wants_core)
