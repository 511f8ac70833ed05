"""The terminal of a command: permanent lines, and below them a few live lines that are redrawn.

The cursor is never hidden and no mode is set, so that a killed process leaves a working terminal. If the
output is not a terminal (a pipe, a file, TERM=dumb), there are no live lines.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.text import Text

_MARGIN = 4  # columns left free: room for the ^C that a terminal echoes


class Terminal:
    """Prints lines from any thread. A closed output is ignored, not an error."""

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None):
        self.console = console or Console(file=stream or sys.stdout, highlight=False, soft_wrap=False)
        self._stream = self.console.file
        if getattr(self._stream, "isatty", lambda: False)():
            self.is_live = not self.console.is_dumb_terminal
        else:
            self.is_live = self.console.is_terminal and not os.environ.get("FORCE_COLOR")
        self._lock = threading.RLock()
        self._live: list[Text] = []
        self._drawn: list[int] = []  # columns of each line that is drawn
        self._broken = False

    @property
    def size(self) -> tuple[int, int]:
        """Return the current numbers of columns and rows."""
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError, AttributeError):
            return self.console.size
        return found.columns or 80, found.lines or 24

    def print(self, *renderables: RenderableType) -> None:
        """Print permanent lines above the live ones."""
        with self._lock:
            text = "".join(map(self._rendered, renderables))
            self._write(self._erased() + text + self._redrawn())

    def show(self, lines: Sequence[Text]) -> None:
        """Replace the live lines; without a terminal nothing is shown."""
        with self._lock:
            self._live = list(lines) if self.is_live else []
            if self._is_in_foreground():
                self._write(self._erased() + self._redrawn())

    def settle(self, *, keep: bool) -> None:
        """End the live lines: keep them as permanent lines, or erase them."""
        with self._lock:
            lines, self._live = self._live, []
            erased = self._erased()
            kept = "".join(map(self._rendered, map(self._cut, lines))) if keep else ""
            if erased or kept:
                self._write(erased + kept)

    def _rendered(self, renderable: RenderableType) -> str:
        if self._broken:  # rich would flush the closed stream and exit
            return ""
        self.console.size = ConsoleDimensions(*self.size)  # rich would query stdin, maybe another window
        with self.console.capture() as capture:
            self.console.print(renderable, soft_wrap=not self.is_live)
        return capture.get()

    def _cut(self, line: Text) -> Text:
        cut = line.copy()
        cut.truncate(max(self.size[0] - _MARGIN, 1), overflow="ellipsis")
        return cut

    def _redrawn(self) -> str:
        lines = [self._cut(line) for line in self._live[: max(self.size[1] - 1, 1)]]
        self._drawn = [line.cell_len for line in lines]
        return "".join(map(self._rendered, lines)).removesuffix("\n")

    def _erased(self) -> str:
        if not self._drawn:
            return ""
        width, _ = self.size  # a window that became narrower has wrapped the lines
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        self._drawn = []
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def _is_in_foreground(self) -> bool:
        """Return False for a background job of a shell, which would draw over the shell's prompt."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):
            return True

    def _write(self, text: str) -> None:
        if self._broken or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the window or the pipe is closed
            self._broken = True
