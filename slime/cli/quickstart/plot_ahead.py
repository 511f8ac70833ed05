"""The plot of a quick start, drawn by a process that has imported matplotlib while the model was trained."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from slime.cli.quickstart.outcome import QuickstartOutcome, draw_plot
from slime.utils.machine import warm_start
from slime.utils.machine.processes import Child, import_environment, thread_environment

_NICENESS = 10  # of the imports: who trains goes first


class Plotter:
    """Draws one plot; in this process where the other one is missing."""

    def __init__(self, child: Child | None, pipe: int) -> None:
        self._child, self._pipe = child, pipe

    def draw(self, outcome: QuickstartOutcome, path: Path, *, title: str) -> None:
        """As `draw_plot`."""
        if self._child is not None:
            curves = dataclasses.asdict(dataclasses.replace(outcome, examples=[]))
            with contextlib.suppress(BrokenPipeError), open(self._pipe, "w", closefd=False) as told:
                json.dump({"curves": curves, "path": str(path), "title": title}, told)
            self.hang_up()
            if self._child.wait() == 0:
                return
        draw_plot(outcome, path, title=title)

    def hang_up(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1


@contextlib.contextmanager
def plotting() -> Iterator[Plotter]:
    """Where processes can be forked, one imports what a plot needs from now on."""
    theirs, ours = os.pipe()
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(theirs)]
    env = {**os.environ, **thread_environment(1), **import_environment()}
    with open(os.devnull, "wb") as nowhere:
        child = warm_start.fork(command, env, nowhere.fileno(), [theirs])
    os.close(theirs)
    plotter = Plotter(child, ours)
    try:
        yield plotter
    finally:
        plotter.hang_up()
        if child is not None:
            child.kill()
            child.wait()


def main() -> None:
    """`... FD`: draws what is written there; nothing where it is closed without a word."""
    os.nice(_NICENESS)
    import matplotlib  # here: it is an extra, and what this process is for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: F401

    with open(int(sys.argv[1])) as told:
        text = told.read()
    if text:
        job = json.loads(text)
        draw_plot(QuickstartOutcome(**job["curves"]), Path(job["path"]), title=job["title"])
