"""The page beside a run (--dashboard): a process of its own, which ends with the run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

_END_S = 5.0


@contextlib.contextmanager
def page_beside(run_dir: str) -> Iterator[None]:
    """Serves the page of a run while the block lasts; where that fails, the run goes on and it is told."""
    words = [sys.executable, "-m", "slime", "dashboard", run_dir, "--beside"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    threading.Thread(target=_tell, args=(process,), name="page", daemon=True).start()
    try:
        yield
    finally:
        assert process.stdin is not None, "it was asked for"
        with contextlib.suppress(OSError):
            process.stdin.close()  # which is how it learns of the end
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tell(process: subprocess.Popen[str]) -> None:
    """Its address, or why there is none; what it prints later is nobody's concern."""
    assert process.stdout is not None, "it was asked for"
    print(process.stdout.readline().rstrip() or "the page of this run could not be started", flush=True)
    for _ in process.stdout:
        pass
