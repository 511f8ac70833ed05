"""Runs the dashboard of `--dashboard` in a separate process that ends with the run."""

import contextlib
import io
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

from slime.utils.machine import children


@contextlib.contextmanager
def page_beside(run_dir: str) -> Iterator[None]:
    """Serve the dashboard while the block runs; if that fails, print a message and continue the run."""
    words = [sys.executable, "-m", "slime", "dashboard", run_dir, "--beside"]
    process = children.start(words, stdin=children.PIPE, output=children.PIPE)
    ended = threading.Event()
    threading.Thread(target=_print_output, args=(process, ended), name="page", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        assert process.stdin is not None, "it was opened as a pipe"
        with contextlib.suppress(OSError):
            process.stdin.close()  # the dashboard ends then
        children.wait_or_kill(process, grace_s=5.0)


def _print_output(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """Print the address of the dashboard, and its last lines if it dies before the run ends."""
    assert process.stdout is not None, "it was opened as a pipe"
    lines = io.TextIOWrapper(process.stdout, errors="replace")
    first = lines.readline().rstrip()
    if not ended.is_set():
        print(first or "the dashboard of this run could not be started", flush=True)
    last = deque((line.rstrip() for line in lines), maxlen=5)
    code = process.wait()
    if first and not ended.is_set():
        how = children.describe_exit(code)
        tail = "\n".join(["; its last lines:", *last]) if last else ""
        print(f"the dashboard {how}; the run continues{tail}", flush=True)
