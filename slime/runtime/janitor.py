"""Removes a run's shared memory when its driver ends, however it ends, from a small process of its own.

That process uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

_GRACE_S = 2.0  # workers that are ending may still make a segment


def remove_when_driver_ended(fd: int, pattern: str) -> None:
    """Wait for the end of the pipe, then remove the files: at once, and again for what came late."""
    while os.read(fd, 1):
        pass
    for pause_s in (_GRACE_S, 0.0):
        folder, _, name = pattern.rpartition("/")
        for path in Path(folder).glob(name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        time.sleep(pause_s)


class Janitor:
    """Starts the process that cleans up after the driver, and holds it."""

    def __init__(self, folder: Path, prefix: str):
        from slime.utils.machine import children  # not in the janitor's own process

        self._life = children.LifePipe()
        read_fd = self._life.read_fd
        command = [sys.executable, "-S", "-E", __file__, str(read_fd), f"{folder}/{prefix}-*"]
        self._process = children.start(command, pass_fds=[read_fd])

    def dismiss(self) -> None:
        """End the process: the driver cleans up itself."""
        self._process.kill()
        self._process.wait()
        self._life.close()


if __name__ == "__main__":
    remove_when_driver_ended(int(sys.argv[1]), sys.argv[2])
