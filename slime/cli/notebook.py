"""Shows a run in a notebook: the live lines are one output of the cell, which is updated in place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from slime.observability.terminal.terminal import Terminal


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. Only such a process has IPython loaded."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find is not None and getattr(find(), "kernel", None) is not None


class NotebookTerminal(Terminal):
    """Prints lines to the output of a cell; `show` replaces one display of it."""

    def __init__(self, stream: TextIO) -> None:
        # rich's own notebook output cannot be replaced once it is drawn.
        super().__init__(console=Console(file=stream, highlight=False, force_jupyter=False))
        self.is_live = True
        self._display: Any = None

    @property
    def size(self) -> tuple[int, int]:
        return 100, 40  # the size of a cell is unknown

    def show(self, lines: Sequence[Text]) -> None:
        data = {"text/plain": "\n".join(line.plain for line in map(self._cut, lines))}
        with self._lock:
            if self._display is None:
                # It is there: see in_notebook.
                self._display = importlib.import_module("IPython.display").display(
                    data, raw=True, display_id=True
                )
            else:
                self._display.update(data, raw=True)

    def settle(self, *, keep: bool) -> None:
        if not keep and self._display is not None:
            self.show(())
        self._display = None
