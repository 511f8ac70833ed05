"""Processes that may end while a test looks at them, and such that end with their test."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

# Starts a command and ends with its code. When whoever holds the other end of the pipe has ended, in whatever
# way, the group ends: a script, and what it has started.
_LEADER = """
import os, signal, subprocess, sys, threading

def end_with(pipe):
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


def cmdline(process: psutil.Process) -> list[str]:
    """[] of one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def mortal_children() -> set[psutil.Process]:
    """What this process has started, without what stays for its next tests: templates, workers of rewards."""
    staying = ("rm_hub", "warm_start")
    children = psutil.Process().children(recursive=True)
    return {child for child in children if not any(name in " ".join(cmdline(child)) for name in staying)}


def run_script(command: Sequence[Any], timeout_s: float | None = None, **options: Any) -> int:
    """The code with which a command ends, as `subprocess.run` has it; nothing of it outlives the test.

    Not if the test fails, is interrupted or is late, and not if its process is killed: left alone, a script
    would go on with its next line.
    """
    ours, theirs = os.pipe()[::-1]
    leader = None
    try:
        leader = subprocess.Popen(
            [sys.executable, "-c", _LEADER, str(theirs), *map(str, command)],
            pass_fds=[theirs], start_new_session=True, **options,
        )  # fmt: skip
        return leader.wait(timeout_s)
    finally:
        os.close(ours)
        os.close(theirs)
        if leader is not None:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()
