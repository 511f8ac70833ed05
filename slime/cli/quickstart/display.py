"""What the quick start shows: a live line per phase on a
terminal, plain lines elsewhere, and tables at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slime.cli.quickstart.metrics import ACCURACY, MetricsFollower, Record
from slime.cli.quickstart.outcome import Outcome
from slime.cli.quickstart.tasks import Task

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
BAR_WIDTH = 20
NUM_PLAIN_LINES = 10  # per phase, where there is no terminal


@dataclass(frozen=True, slots=True)
class Phase:
    """A run to follow: `value_key` is the number worth watching, logged once per step."""

    title: str
    num_steps: int
    value_key: str
    value_name: str


class Screen:
    """Prints to a terminal with a live line, or to a pipe or file with plain ones."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(escape(text))

    @contextmanager
    def following(self, phase: Phase, metrics: Path) -> Iterator[None]:
        """Show how `phase` goes, from the metrics it writes, while the `with` block runs it."""
        view = (LiveView if self.console.is_terminal else PlainView)(self.console, phase)
        with view, MetricsFollower(metrics, view.update):
            yield

    def show_outcome(self, outcome: Outcome, task: Task, *, num_held_out: int, control: str | None) -> None:
        self.say(f"\nHeld-out accuracy, {num_held_out} questions never trained on:")
        self.console.print(accuracy_table(outcome))
        if outcome.examples:
            self.say("Greedy answers to held-out questions:")
            self.console.print(example_table(outcome))
        self.say(f"Split: {task.split}")
        if control is None:
            self.say(f"What was learned: {task.learned}")
        else:
            before, after = outcome.accuracy["greedy"][0], outcome.accuracy["greedy"][-1]
            words = "rose all the same, so not by the reward" if after > before else "did not rise"
            self.say(f"Control ({control}): every reward was a coin toss. Accuracy {words}.")


class LiveView:
    """One line that is redrawn: bar, steps, latest value, its history as blocks, time."""

    def __init__(self, console: Console, phase: Phase) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[value]}"),
            TimeElapsedColumn(),
        )
        self._console, self._phase = console, phase
        self._values: dict[int, float] = {}  # by step: a run may report the same value twice
        self._notes = ""
        # stderr is left alone: it goes to the log file, and rich would bring its lines back above the bar.
        self._progress = Progress(*columns, console=console, redirect_stderr=False)
        self._bar = self._progress.add_task(phase.title, total=phase.num_steps, value="starting")

    def __enter__(self) -> "LiveView":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def update(self, record: Record) -> None:
        if ACCURACY["greedy"] in record:
            self._notes = f"  held-out {record[ACCURACY['greedy']]:.1%}"
        if self._phase.value_key in record:
            self._values[int(record["step"])] = record[self._phase.value_key]
            self._progress.update(self._bar, completed=len(self._values))
        if self._values:
            values = list(self._values.values())
            latest = f"{self._phase.value_name} {values[-1]:.3f}"
            history = sparkline(values, self._room_for_history(latest))
            self._progress.update(self._bar, value=" ".join(filter(None, [latest, history])) + self._notes)

    def _room_for_history(self, latest: str) -> int:
        """What bar, numbers and time leave of the line."""
        counts = 2 * len(str(self._phase.num_steps)) + 1
        words = (self._phase.title, "-" * BAR_WIDTH, "-" * counts, latest + self._notes, "0:00:00")
        return max(0, min(SPARK_WIDTH, self._console.width - sum(len(word) + 1 for word in words)))


class PlainView:
    """About ten lines per phase, and one per evaluation."""

    def __init__(self, console: Console, phase: Phase) -> None:
        self._console = console
        self._phase = phase
        self._stride = max(1, phase.num_steps // NUM_PLAIN_LINES)
        self._done = 0

    def __enter__(self) -> "PlainView":
        self._console.print(f"{self._phase.title}: {self._phase.num_steps} steps")
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self, record: Record) -> None:
        if ACCURACY["greedy"] in record:
            greedy, sampled = (record[ACCURACY[name]] for name in ("greedy", "sampled"))
            self._console.print(f"  held-out accuracy: greedy {greedy:.1%}, sampled {sampled:.1%}")
        if self._phase.value_key not in record:
            return
        seen, self._done = self._done, int(record["step"]) + 1
        if self._done > seen and (self._done % self._stride == 0 or self._done == self._phase.num_steps):
            value = record[self._phase.value_key]
            self._console.print(
                f"  step {self._done}/{self._phase.num_steps}  {self._phase.value_name} {value:.3f}"
            )


def sparkline(values: list[float], width: int = SPARK_WIDTH) -> str:
    """The latest values as blocks, scaled between the smallest and the largest shown: [0, 0.5, 1] -> ▁▅█."""
    shown = values[-width:] if width else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in shown)


def accuracy_table(outcome: Outcome) -> Table:
    table = Table()
    for heading in ("answers", "before", "after"):
        table.add_column(heading, justify="left" if heading == "answers" else "right")
    for name, values in outcome.accuracy.items():
        table.add_row(name, f"{values[0]:.1%}", f"{values[-1]:.1%}")
    return table


def example_table(outcome: Outcome) -> Table:
    table = Table()
    for heading in ("question", "right", "before", "after"):
        table.add_column(heading, overflow="fold")
    for example in outcome.examples:
        before, after = (_marked(answer, example.label) for answer in (example.before, example.after))
        table.add_row(escape(example.prompt), escape(example.label), before, after)
    return table


def _marked(answer: str, label: str) -> str:
    """Green where the answer is, or ends with, the right one; only a hint for the eye, the reward decides."""
    colour = "green" if answer.strip().rstrip(".").endswith(label) else "red"
    return f"[{colour}]{escape(answer.strip())}[/{colour}]"
