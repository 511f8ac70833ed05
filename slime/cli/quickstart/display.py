"""The quick start's output: live lines on a terminal, plain lines elsewhere, and tables at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime.cli.quickstart.outcome import ACCURACY, QuickstartOutcome
from slime.cli.quickstart.tasks import Task
from slime.liveness import phases
from slime.observability.logging_utils import configure_logger
from slime.observability.terminal.capture import Capture, Lines
from slime.observability.terminal.metrics_tail import MetricsReader, Repeated, Row
from slime.observability.terminal.progress import Progress, live_lines
from slime.observability.terminal.terminal import Terminal
from slime.utils.printable import printable

NUM_PLAIN_LINES = 10  # per phase, where there is no terminal


class Screen:
    """Prints live lines to a terminal, or plain lines to a pipe or file; `quiet` prints neither."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.terminal = Terminal(console=console)
        self._quiet = quiet

    def say(self, text: str) -> None:
        self.terminal.print(Text(text))

    @contextmanager
    def logging_to(self, path: Path) -> Iterator[None]:
        """Send log lines and progress bars of libraries to a file; what plug-ins print is also shown."""
        before = self.terminal
        try:
            with Capture(Lines(lambda line: self.say(printable(line)))) as capture, capture.into(path):
                self.terminal = Terminal(capture.stdout)
                yield
        finally:
            self.terminal = before
            configure_logger()  # back to the real stderr

    @contextmanager
    def following(self, progress: Progress, metrics: Path) -> Iterator[None]:
        """Show the progress of the run inside the block, read from the metrics that it writes."""
        if self._quiet:
            yield
            return
        view = _View(self.terminal, progress, MetricsReader(metrics))
        try:
            with Repeated(view.look, "quickstart-metrics"):
                yield
        finally:
            self.terminal.settle(keep=True)

    def show_outcome(
        self, outcome: QuickstartOutcome, task: Task, *, num_held_out: int, control: str | None
    ) -> None:
        self.say(f"\nHeld-out accuracy, {num_held_out} questions never trained on:")
        self.terminal.print(accuracy_table(outcome))
        if outcome.examples:
            self.say("Greedy responses to held-out questions:")
            self.terminal.print(example_table(outcome))
        self.say(f"Split: {task.split}")
        if control is None:
            self.say(f"What was learned: {task.learned}")
        else:
            before, after = outcome.accuracy["greedy"][0], outcome.accuracy["greedy"][-1]
            words = "rose anyway, so the reward did not cause it" if after > before else "did not rise"
            self.say(f"Control ({control}): every reward was a coin toss. Accuracy {words}.")


class _View:
    """Live lines on a terminal; elsewhere about ten lines per phase, and one per evaluation."""

    def __init__(self, terminal: Terminal, progress: Progress, rows: MetricsReader) -> None:
        self._terminal, self._progress, self._rows = terminal, progress, rows
        self._note = ""
        if not terminal.is_live:
            terminal.print(Text(f"{progress.title}: {progress.total} steps"))

    def look(self) -> None:
        for row in self._rows.new_records():
            ended = self._progress.add(row)
            if ACCURACY["greedy"] in row:
                self._note = f"held-out {row[ACCURACY['greedy']]:.1%}"
            if not self._terminal.is_live:
                self._print_plainly(row, ended)
        now = ", ".join(f"{wait.name} {wait.age_s:.0f} s" for wait in phases.active())
        width = self._terminal.size[0] - 4
        self._terminal.show(live_lines(self._progress, width, note=self._note, doing=now))

    def _print_plainly(self, row: Row, ended: bool) -> None:
        if ACCURACY["greedy"] in row:
            greedy, sampled = (row[ACCURACY[name]] for name in ("greedy", "sampled"))
            self._terminal.print(Text(f"  held-out accuracy: greedy {greedy:.1%}, sampled {sampled:.1%}"))
        done, total = self._progress.done, self._progress.total or 0
        if ended and (done % max(1, total // NUM_PLAIN_LINES) == 0 or done == total):
            value = f"{self._progress.main.title} {row[self._progress.main.metric]:.3f}"
            self._terminal.print(Text(f"  step {done}/{total}  {value}"))


def accuracy_table(outcome: QuickstartOutcome) -> Table:
    table = Table("responses")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for name, values in outcome.accuracy.items():
        table.add_row(name, f"{values[0]:.1%}", f"{values[-1]:.1%}")
    return table


def example_table(outcome: QuickstartOutcome) -> Table:
    table = Table()
    for heading in ("question", "right", "before", "after"):
        table.add_column(heading, overflow="fold")
    for example in outcome.examples:
        responses = (_marked(text, example.label) for text in (example.before, example.after))
        table.add_row(Text(example.prompt), Text(example.label), *responses)
    return table


def _marked(answer: str, label: str) -> Text:
    """Colour a response green where it ends with the label; only a hint, the reward decides."""
    return Text(answer.strip(), "green" if answer.strip().rstrip(".").endswith(label) else "red")
