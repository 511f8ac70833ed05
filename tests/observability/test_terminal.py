"""Lines that are redrawn in place, progress as text, and the capture of what a process prints."""

import contextlib
import logging
import os
import subprocess
import sys

import pytest
from rich.text import Text
from terminal import Window

from slime.catalog.loss_types import LOSS
from slime.observability.terminal.capture import Capture, Lines, log_to
from slime.observability.terminal.metrics_tail import MetricsReader
from slime.observability.terminal.progress import Progress, live_lines, plain_line, sparkline
from slime.observability.terminal.terminal import Terminal
from slime.observability.tracking import read_metrics


def steps(count: int, start: int = 1) -> list[dict]:
    """Rows as a run logs them: push, rollout, training."""
    rows = []
    for step in range(count):
        head = {"start": start, "step": step, "step_key": "rollout/step"}
        rows.append({**head, "perf/update_weights_time": 1.0})
        rows.append(
            {
                **head,
                "rollout/raw_reward": step / 10,
                "rollout/num_samples": 64,
                "rollout/response_len/mean": 100.0,
                "rollout/staleness/mean": 0.0,
                "perf/train_wait_time": 6.0,
            }
        )
        rows.append({**head, "step_key": "train/step", "train/loss": -0.1})
        rows.append({**head, "perf/train_time": 2.0, "perf/step_time": 10.0})
    return rows


def fed(rows: list[dict], **options) -> Progress:
    progress = Progress(**options)
    for row in rows:
        progress.add(row)
    return progress


def test_progress_knows_where_the_time_goes_and_how_long_it_takes():
    progress = fed(steps(12), total=500)
    assert progress.done == 12 and progress.seconds_left() == 4880.0
    assert progress.tokens_per_second() == 640.0
    shares = {"generate": 0.6, "train": 0.2, "push": 0.1, "other": 0.1}
    assert progress.split() == pytest.approx(shares)
    line = plain_line(progress)
    for words in ("step 12/500", "reward 1.100", "640 tok/s", "eta 1:21:20", "generate 60%", "staleness 0"):
        assert words in line


def test_the_end_is_near_where_a_timed_rollout_is_many_counted_steps():
    progress = Progress(total=400, title="SFT", main=LOSS, done_key="train/loss")
    for rollout in range(3):
        for step in range(20 * rollout, 20 * rollout + 20):
            progress.add({"step_key": "train/step", "step": step, "train/loss": 1.0})
        progress.add({"step_key": "rollout/step", "step": rollout, "perf/step_time": 2.0})
    assert progress.done == 60 and progress.seconds_left() == pytest.approx(2.0 * 17)


def test_the_first_step_of_a_start_does_not_count_once_there_is_another():
    rows = steps(3)
    rows[3]["perf/step_time"] = 100.0  # kernels were compiled
    progress = fed(rows[:4], total=10)
    assert progress.step_seconds() == 100.0
    for row in rows[4:]:
        progress.add(row)
    assert progress.step_seconds() == 10.0 and progress.tokens_per_second() == 640.0


def test_a_step_ends_once_and_a_resumed_run_goes_back():
    progress = Progress(total=20)
    assert sum(progress.add(row) for row in steps(5)) == 5
    again = [row | {"step": row["step"] + 3} for row in steps(1, start=2)]
    assert [progress.add(row) for row in again] == [False, False, False, True]
    assert progress.done == 4 and len(progress.values) == 5


@pytest.mark.parametrize("width", [10, 40, 76, 116, 300])
@pytest.mark.parametrize("num_steps", [0, 1, 400])
def test_live_lines_fit_any_width(width, num_steps):
    progress = fed(steps(num_steps), total=500)
    progress.add({"step": 0, "step_key": "eval/step", "eval/" + "long" * 20: 0.5})
    for line in live_lines(progress, width, doing="generating 3 s"):
        assert line.cell_len <= max(width, 5) and "\n" not in line.plain


@pytest.mark.parametrize(("title", "note"), [("train", ""), ("RL", "held-out 99.0%")])
def test_80_columns_have_room_for_the_count_the_curve_the_speed_and_the_end(title, note):
    progress = fed(steps(40), total=500)
    progress.title = title
    line = live_lines(progress, 76, note=note)[0].plain
    assert all(word in line for word in ("40/500", "reward 3.900", "tok/s", "eta 1:16:40", note)), line
    assert sum(letter in "▁▂▃▄▅▆▇█" for letter in line) >= 8, line


def test_odd_rows_are_no_error():
    progress = Progress(total=None)
    for row in ({}, {"step": None}, {"step": 1, "rollout/raw_reward": None}, {"step": 2, "x": "y"}):
        assert not progress.add(row)
    assert live_lines(progress, 80) and plain_line(progress) == "step 0"


def test_a_sparkline_spans_the_smallest_to_the_largest_value():
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"


def test_a_half_written_line_is_read_once_it_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new_records() == []
    path.write_text('{"a": 1}\n{"a"')
    assert reader.new_records() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert reader.new_records() == [{"a": 2}]


def test_what_a_full_disk_left_of_a_line_hides_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": {"a": 2}\n\xff\xfe\n[3]\n{"a": 4}\n')
    assert MetricsReader(path).new_records() == read_metrics(path) == [{"a": 1}, {"a": 4}]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_lines_stay_above_those_that_are_redrawn(columns, rows, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    window = Window(columns, rows)
    terminal = Terminal(window.stream)
    for step in range(50):
        terminal.show([Text(f"live {step}"), Text("x" * 500)])
        terminal.print(Text(f"said {step}"))
    terminal.settle(keep=True)
    terminal.print(Text("after"))
    lines = [line for line in window.close().lines() if line]
    assert lines[:50] == [f"said {step}" for step in range(50)]
    assert lines[50] == "live 49" and lines[51].endswith("…") and len(lines[51]) < columns
    assert lines[52:] == ["after"]


def test_nothing_is_left_of_lines_that_go_nor_is_the_cursor_hidden(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    window = Window(80, 24)
    terminal = Terminal(window.stream)
    terminal.show([Text("one"), Text("two"), Text("three")])
    terminal.show([Text("one")])
    terminal.settle(keep=False)
    shown = window.close()
    assert not any(shown.lines()) and "\x1b[?25l" not in shown.written


def test_a_window_that_shrinks_keeps_lines_within_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    window = Window(120, 40)
    terminal = Terminal(window.stream)
    terminal.show([Text("y" * 200)])
    window.resize(40, 10)
    assert terminal.size == (40, 10)
    terminal.show([Text("y" * 200)])
    written = window.close().written
    assert "\x1b[2A" in written  # 116 columns are three rows of forty
    assert written.rsplit("\x1b[J", 1)[1].count("y") == 35


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_dumb_terminals_get_plain_lines_and_no_color_no_colours(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    window = Window(80, 24)
    terminal = Terminal(window.stream)
    terminal.show([Text("live")])
    terminal.print(Text("said", "red"))
    written = window.close().written
    assert "said" in written and "\x1b[31m" not in written
    assert terminal.is_live == ("NO_COLOR" in environment) == ("live" in written)


@pytest.mark.parametrize("length", [5, 100_000])  # one that the stream keeps, and one that it does not
def test_an_output_that_is_gone_does_not_end_anything(length):
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    terminal = Terminal(stream)
    terminal.print(Text("a" * length))
    terminal.print(Text("again"))
    with contextlib.suppress(OSError):
        stream.close()


def test_all_that_a_process_writes_is_in_the_file_and_prints_are_handed_on(tmp_path, capfd):
    lines: list[str] = []
    with Capture(Lines(lines.append)) as capture:
        print("before there is a file")
        with log_to(tmp_path / "logs" / "driver.log"):
            print("one\ntwo", end="\n")
            print("bar 1\rbar 2")
            print("to stderr", file=sys.stderr)
            os.write(1, b"of C++\n")
            subprocess.run(["sh", "-c", "echo of a child; echo its error >&2"], check=True)
            kept = sys.stderr
        capture.stdout.write("shown\n")
    print("afterwards", file=kept)
    log = (tmp_path / "logs" / "driver.log").read_text()
    for words in ("before there is a file", "two", "to stderr", "of C++", "of a child", "its error"):
        assert words in log
    assert lines == ["before there is a file", "one", "two", "bar 2"]
    out, err = capfd.readouterr()
    assert (out, err) == ("shown\n", "afterwards\n")


def test_one_file_within_another(tmp_path):
    with Capture() as capture, capture.into(tmp_path / "outer"):
        print("a")
        with log_to(tmp_path / "inner"):
            print("b")
        print("c")
    assert (tmp_path / "outer").read_text() == "a\nc\n" and (tmp_path / "inner").read_text() == "b\n"


def test_without_a_capture_the_file_gets_log_lines(tmp_path):
    logger = logging.getLogger("slime.test")
    with log_to(tmp_path / "driver.log"):
        logger.warning("noted")
    logger.warning("not noted")
    assert (tmp_path / "driver.log").read_text().rstrip().endswith("WARNING: noted")
