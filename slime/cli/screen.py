"""The terminal view of `slime train`: start panel, start-up, live lines, samples, advice, end panel.

It reads metrics.jsonl, the record of samples, log records and the table of waits. Everything else that the
process prints goes to RUN/logs/driver.log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pdb
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from slime.arguments import Args
from slime.catalog.loss_types import curves_of
from slime.cli.inspect.samples import render_sample
from slime.cli.notebook import NotebookTerminal, in_notebook
from slime.cli.panels import Rows, as_lines, as_panel, closing_rows, start_rows, verdict
from slime.liveness import phases
from slime.observability.logging_utils import FORMAT
from slime.observability.terminal.capture import Capture, Lines
from slime.observability.terminal.metrics_tail import MetricsReader, Repeated
from slime.observability.terminal.progress import Progress, live_lines, plain_line
from slime.observability.terminal.terminal import Terminal
from slime.record import RecordedSample, RecordError, Select, open_record
from slime.utils.files.run_file import METRICS_FILE, name_of_run
from slime.utils.printable import cut_lines, printable

logger = logging.getLogger(__name__)

_PRINTED_LINES = 20  # lines of user code shown per step
_SAME_WARNING = 20  # warnings of one source line that are shown; the log has all
_MESSAGE_LINES = 12
_SHOW_EVERY = 5  # steps between two samples that are shown
_CANDIDATES = 16  # samples of a step, of which one is shown
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class RunScreen(contextlib.ExitStack):
    """Shows a run while the `with` block trains it, and restores the terminal however it ends."""

    def __init__(self, args: Args, command: str = "train") -> None:
        super().__init__()
        self._args, self._run_dir, self._command = args, Path(args.run_dir), command
        self.progress = Progress(args.num_rollout, main=curves_of(vars(args))[0])
        self._rows = MetricsReader(self._run_dir / METRICS_FILE)
        self._capture = Capture(self._on_text)
        self._lines = Lines(self._on_line)
        self._printed = 0
        self._warned: Counter[tuple[str, int]] = Counter()  # warnings by source line
        self._started, self._is_up, self._num_steps = time.monotonic(), False, 0
        self._updates, self._is_blind = Repeated(self.update, "screen"), False

    def __enter__(self) -> RunScreen:
        self.enter_context(self._capture)
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def _open(self) -> None:
        self.terminal = (NotebookTerminal if in_notebook() else Terminal)(self._capture.stdout)
        default = logging.WARNING if self.terminal.is_live or self._args.quiet else logging.INFO
        level = self._args.log_level
        self._handler = _Passed(self, default if level is None else logging.getLevelName(level.upper()))
        logging.getLogger().addHandler(self._handler)
        self.callback(logging.getLogger().removeHandler, self._handler)
        for row in self._rows.new_records():  # rows of earlier starts
            self.progress.add(row)
        self.push(lambda kind, error, trace: self._show_end(error))
        self.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
        sys.breakpointhook = self._on_breakpoint
        self.enter_context(self._updates)

    def _show_end(self, error: BaseException | None) -> None:
        self.terminal.settle(keep=self._num_steps > 0)
        if (error is None or self._num_steps) and not self._args.quiet:
            cause = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            ended = "finished" if error is None else f"ended early ({cause})"
            seconds = time.monotonic() - self._started
            rows = closing_rows(self._args, self.progress, seconds, error)
            self._show_rows(f"{name_of_run(self._run_dir)}: {ended}", rows)
            if error is None and self._num_steps:  # the verdict comes last, as a line that scripts can read
                self.terminal.print(Text(verdict(self._args, self.progress, seconds), "bold"))

    def update(self) -> None:
        """Read new rows and redraw. An error here is logged and does not end the run."""
        if self._is_blind:
            return
        try:
            self._update()
        except Exception:
            self._is_blind = True
            self.terminal.settle(keep=False)
            logger.exception("The live view failed and is no longer updated; the run continues.")

    def _update(self) -> None:
        for row in self._rows.new_records():
            if self.progress.add(row):
                self._printed, self._num_steps = 0, self._num_steps + 1
                self._end_step()
        if not self._args.quiet:
            self.terminal.show(self._live_lines())

    def _live_lines(self) -> list[Text]:
        active = phases.active()
        now = [f"{wait.name} {wait.age_s:.0f} s" for wait in active]
        self._is_up = self._is_up or any(wait.owner == phases.RUN for wait in active)
        if not self._is_up and not self._num_steps:
            elapsed = time.monotonic() - self._started
            return [Text.assemble((f"starting {elapsed:.0f} s", "bold"), ("  " + " · ".join(now), "dim"))]
        return live_lines(self.progress, self.terminal.size[0] - 4, doing=", ".join(now))

    def _end_step(self) -> None:
        if self._args.quiet:
            return
        if not self.terminal.is_live:
            self.terminal.print(Text(plain_line(self.progress)))
        step = self.progress.done - 1
        if step % _SHOW_EVERY == 0 and (sample := self._pick(step)) is not None:
            width = self.terminal.size[0]
            settings = vars(self._args)
            shown = render_sample(sample, width, settings=settings, whole=False, num_lines=(3, 5))
            self.terminal.print(shown)

    def _pick(self, step: int) -> RecordedSample | None:
        """Return a sample of this step; every second time a filtered one, if there is any."""
        try:
            with open_record(self._run_dir) as record:
                samples = record.samples(Select("train", step, limit=_CANDIDATES))
                if step % (2 * _SHOW_EVERY):
                    samples = record.samples(Select("train", step, outcome="filtered", limit=1)) or samples
        except (RecordError, sqlite3.Error):  # there is no record, or it is locked
            return None
        return samples[step % len(samples)] if samples else None

    # -- log records and prints

    def show_record(self, record: logging.LogRecord, text: str) -> None:
        """Show a log record; `text`: its line in the log."""
        ended: phases.Ended | None = getattr(record, "phase", None)
        if ended is not None:
            self._show_started(ended)
        elif not self.terminal.is_live:
            _pass_on(self._capture.stderr, text + "\n")
        else:
            self._show_coloured(record)

    def _show_started(self, ended: phases.Ended) -> None:
        self.progress.total = ended.total or self.progress.total
        self._is_up = self._is_up or ended.name == phases.FIRST_PUSH
        if not self._args.quiet:
            if ended.name == phases.CHECKS:
                rows = start_rows(self._args, self.progress, ended.cost)
                self._show_rows(f"slime {self._command}: {self._args.run_dir}", rows)
            line = Text.assemble(("  ✓ ", "green"), f"{ended.name:<12}{ended.seconds:6.1f} s")
            self.terminal.print(line.append(f"  {printable(ended.note)}" if ended.note else "", "dim"))

    def _show_coloured(self, record: logging.LogRecord) -> None:
        advisory = getattr(record, "advisory", None)
        place = record.pathname, record.lineno
        if advisory is None and record.levelno < logging.ERROR:
            self._warned[place] += 1
            if self._warned[place] > _SAME_WARNING:
                return
        word = record.levelname.lower() if advisory is None else "advice"
        message = printable(record.getMessage() if advisory is None else str(advisory))
        width = max(self.terminal.size[0] - len(word) - 1, 20)
        message = cut_lines(message, _MESSAGE_LINES, 10 * width)
        if self._warned[place] == _SAME_WARNING:
            message += f" (further ones are in {self._run_dir}/logs/driver.log)"
        self.terminal.print(Text.assemble((f"{word} ", _STYLES.get(record.levelno, "dim")), message))

    def _on_text(self, text: str) -> None:
        if self._is_blind or self._args.quiet or not self.terminal.is_live:
            _pass_on(self._capture.stdout, text)
        else:
            self._lines(text)

    def _on_line(self, line: str) -> None:
        """Show a line that user code printed; after many lines only the log has them."""
        self._printed += 1
        if self._printed <= _PRINTED_LINES:
            self.terminal.print(Text(cut_lines(printable(line), 3, self.terminal.size[0])))
        elif self._printed == _PRINTED_LINES + 1:
            self.terminal.print(Text(f"(further output is in {self._run_dir}/logs/driver.log)", "dim"))

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Stop drawing at a `breakpoint()` of user code: the debugger needs the terminal."""
        self._is_blind = True
        self.terminal.settle(keep=True)
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)
        pdb.Pdb().set_trace(sys._getframe(1))

    def _show_rows(self, title: str, rows: Rows) -> None:
        here = f"{os.getcwd()}{os.sep}"  # show paths relative to the current folder
        title, rows = title.replace(here, ""), [(name, text.replace(here, "")) for name, text in rows]
        self.terminal.print((as_panel if self.terminal.is_live else as_lines)(title, rows))


def _pass_on(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
        stream.write(text)
        stream.flush()


class _Passed(logging.Handler):
    """Passes log records of slime from a level on, and errors of any library, to the screen."""

    def __init__(self, screen: RunScreen, level: int) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(FORMAT.format(prefix=""), datefmt="%Y-%m-%d %H:%M:%S"))
        self._screen, self._level, self._pid = screen, level, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        least = self._level if record.name.startswith("slime") else max(self._level, logging.ERROR)
        if os.getpid() != self._pid:  # a forked process must not draw on the screen
            return
        if hasattr(record, "phase") or (record.levelno >= least and not hasattr(record, "shown_elsewhere")):
            try:
                self._screen.show_record(record, self.format(record))
            except Exception:  # a logging handler never raises
                self.handleError(record)
