"""The progress of a run, computed from the rows that it logs, and its rendering as lines of text."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from slime.catalog.loss_types import REWARD, Curve
from slime.catalog.metrics import is_eval_score

STEP_TIME = "perf/step_time"
_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 10  # steps over which speeds and shares are averaged
_SPARK = 24  # steps of the curve
_SPLIT = (
    ("generate", "perf/train_wait_time"),
    ("train", "perf/train_time"),
    ("push", "perf/update_weights_time"),
)


@dataclass(slots=True)
class Progress:
    """Progress of a run, updated with each row of `metrics.jsonl`, those of earlier starts included.

    `main`: the curve to show. `done_key`: a metric that is logged once per step, at its end.
    """

    total: int | None = None
    title: str = "train"
    main: Curve = REWARD
    done_key: str = STEP_TIME
    done: int = 0
    values: dict[int, float] = field(default_factory=dict)
    evals: dict[str, dict[int, float]] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    _steps: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics of the last few steps
    _start: int = 0
    _first: int | None = None  # first step of this start, which is slow (kernels, caches)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return whether it ends a step."""
        step = row.get("step")
        if not isinstance(step, int):
            return False
        numbers = {key: float(value) for key, value in row.items() if _is_number(value)}
        if int(numbers.get("start", 0)) > self._start:  # a resumed run may repeat steps
            self._start, self.done = int(numbers["start"]), min(self.done, step)
            self._steps, self._first = {}, None
        self.latest |= numbers
        self._first = step if self._first is None else self._first
        if self.main.metric in numbers:
            self.values[step] = numbers[self.main.metric]
        for key in filter(is_eval_score, numbers):
            self.evals.setdefault(key, {})[step] = numbers[key]
        if str(row.get("step_key", "rollout/step")) == "rollout/step":
            self._steps.setdefault(step, {}).update(numbers)
            while len(self._steps) > _RECENT + 1:
                del self._steps[next(iter(self._steps))]
        if self.done_key not in numbers or step < self.done:
            return False
        self.done = step + 1
        return True

    def step_seconds(self) -> float | None:
        """Return the mean time of the last steps; None: not known yet."""
        times = [numbers[STEP_TIME] for numbers in self._whole_steps((STEP_TIME,))]
        return statistics.fmean(times) if times else None

    def seconds_left(self) -> float | None:
        each = self.step_seconds()
        if each is None or self.total is None:
            return None
        # A timed rollout may hold several counted steps, as in supervised runs.
        timed = 1 + max(step for step, numbers in self._steps.items() if STEP_TIME in numbers)
        return each * max(0, self.total - self.done) * (timed / self.done if self.done else 1.0)

    def tokens_per_second(self) -> float | None:
        """Return the response tokens of the last steps divided by their whole time."""
        needed = ("rollout/num_samples", "rollout/response_len/mean", STEP_TIME)
        steps = [tuple(numbers[key] for key in needed) for numbers in self._whole_steps(needed)]
        seconds = sum(time for _, _, time in steps)
        return sum(count * length for count, length, _ in steps) / seconds if seconds else None

    def split(self) -> dict[str, float]:
        """Return shares of the last steps' time; overlapped generation counts only while it is waited for."""
        steps = self._whole_steps((STEP_TIME,))
        total = sum(numbers[STEP_TIME] for numbers in steps)
        if not total:
            return {}
        shares = {name: sum(numbers.get(key, 0.0) for numbers in steps) / total for name, key in _SPLIT}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}

    def _whole_steps(self, needed: Iterable[str]) -> list[dict[str, float]]:
        """Return complete steps, without the slow first step of a start if there are others."""
        whole = {step: numbers for step, numbers in self._steps.items() if numbers.keys() >= set(needed)}
        return [numbers for step, numbers in whole.items() if step != self._first or len(whole) == 1]


def live_lines(progress: Progress, width: int, *, note: str = "", doing: str = "") -> list[Text]:
    """Return two lines: progress and metrics; the current activity and where the time goes."""
    title, count, value, speeds = progress.title, _count(progress), _value(progress), _speeds(progress)
    room = width - sum(len(word) + 2 for word in (title, count, value, note, *speeds) if word)
    curve = sparkline(list(progress.values.values()), min(_SPARK, max(0, room)))
    words = [(title, "bold"), (count, ""), (value, "bold"), (curve, "green"), (note, "")]
    lines = [Text("  ").join(_fitting(words + [(word, "dim") for word in speeds], width, 2))]
    details = [(word, "dim") for word in (doing, _split_words(progress), *_quality(progress))]
    second = _fitting(details, width - 2, 3)
    return lines + ([Text("  ") + Text(" · ", "dim").join(second)] if second else [])


def plain_line(progress: Progress) -> str:
    """Return the progress as one line for a file or a pipe."""
    words = [f"step {_count(progress)}", _value(progress), *_speeds(progress), _split_words(progress)]
    return "  ".join(filter(None, [*words, *_quality(progress)]))


def sparkline(values: list[float], width: int = _SPARK) -> str:
    """Draw the latest values as blocks between their minimum and maximum: [0, 0.5, 1] -> ▁▅█."""
    shown = values[-width:] if width else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


def duration(seconds: float) -> str:
    """Format seconds: 3723.4 -> 1:02:03."""
    return str(datetime.timedelta(seconds=round(max(0.0, seconds))))


def short(number: float) -> str:
    """Format a number briefly: 12345.6 -> 12.3k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _count(progress: Progress) -> str:
    return f"{progress.done}/{progress.total}" if progress.total else f"{progress.done}"


def _value(progress: Progress) -> str:
    if not progress.values:
        return ""
    return f"{progress.main.title} {list(progress.values.values())[-1]:.3f}"


def _speeds(progress: Progress) -> list[str]:
    tokens, left, each = progress.tokens_per_second(), progress.seconds_left(), progress.step_seconds()
    words = [f"{short(tokens)} tok/s"] if tokens is not None else []
    words += [f"{each:.1f} s/step"] if each is not None and left is None else []
    return [*words, *([f"eta {duration(left)}"] if left else [])]


def _split_words(progress: Progress) -> str:
    return " ".join(f"{name} {share:.0%}" for name, share in progress.split().items())


def _quality(progress: Progress) -> list[str]:
    words = []
    if "rollout/staleness/mean" in progress.latest:
        words.append(f"staleness {progress.latest['rollout/staleness/mean']:.2g}")
    return words + [f"{key} {list(values.values())[-1]:.3g}" for key, values in progress.evals.items()]


def _fitting(words: list[tuple[str, str]], width: int, gap: int) -> list[Text]:
    """Return the words that fit into a line, earlier ones first; `gap`: columns between two words."""
    shown = []
    room = width + gap
    for word, style in words:
        if word and len(word) + gap <= room:
            shown.append(Text(word, style))
            room -= len(word) + gap
    return shown


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
