"""A command in a pseudo-terminal: what it wrote, and what a person would see at the end."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shown:
    """`written`: every byte that reached the terminal, as text."""

    code: int
    written: str
    columns: int
    rows: int

    def lines(self) -> list[str]:
        """All lines that a person could scroll through at the end, without trailing blanks."""
        import pyte

        screen = pyte.HistoryScreen(self.columns, self.rows, history=100_000)
        pyte.Stream(screen).feed(self.written)
        above = ["".join(line[i].data for i in range(self.columns)) for line in screen.history.top]
        return [line.rstrip() for line in (*above, *screen.display)]


def run_in_terminal(*words: str, columns: int, rows: int, timeout_s: float = 240, **env: str) -> Shown:
    """Run `python WORDS...` with stdin, stdout and stderr on a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    unset = {"COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", "PYTHONPATH": path, **env},
        start_new_session=True,
    )
    os.close(theirs)
    written = bytearray()
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the last holder of the other end is gone
                break
            if not piece:
                break
            written += piece
        code = process.wait(timeout_s)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return Shown(code, written.decode("utf-8", errors="replace"), columns, rows)


class Window:
    """A terminal of this process: `stream` writes to it, `close` tells what a person sees."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return

    def close(self) -> Shown:
        """All that was written, once nobody can write any more."""
        self.stream.close()
        self._reader.join()
        os.close(self._ours)
        return Shown(0, self._written.decode("utf-8", errors="replace"), self.columns, self.rows)
