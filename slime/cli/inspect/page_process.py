"""The page beside a run (--dashboard): a process of its own, which ends with the run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

_END_S = 5.0
_LAST_LINES = 5


@contextlib.contextmanager
def page_beside(run_dir: str) -> Iterator[None]:
    """Serves the page of a run while the block lasts; where that fails, the run goes on and it is told."""
    words = [sys.executable, "-m", "slime", "dashboard", run_dir, "--beside"]
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which ends it
    )
    ended = threading.Event()  # on purpose
    threading.Thread(target=_tell, args=(process, ended), name="page", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        assert process.stdin is not None, "it was asked for"
        with contextlib.suppress(OSError):
            process.stdin.close()  # which is how it learns of the end
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tell(process: subprocess.Popen[str], ended: threading.Event) -> None:
    """Its address, or why there is none; what it printed later only where it dies before the run does."""
    assert process.stdout is not None, "it was asked for"
    first = process.stdout.readline().rstrip()
    if not ended.is_set():
        print(first or "the page of this run could not be started", flush=True)
    last = deque((line.rstrip() for line in process.stdout), maxlen=_LAST_LINES)
    code = process.wait()
    if first and not ended.is_set():
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        said = "\n".join(["; last it said:", *last]) if last else ""
        print(f"the page of this run {how}; the run goes on{said}", flush=True)
