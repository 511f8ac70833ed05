"""The screen of `slime train`, fed with what a run writes; no process is started."""

import io
import json
import logging
import re
import sys
import types

import pytest
from argument_helpers import parse
from terminal import Window

from slime.cli import panels, screen
from slime.cli.notebook import in_notebook
from slime.cli.screen import RunScreen
from slime.liveness import phases
from slime.observability.advisories import Advisory
from slime.observability.terminal.capture import log_to
from slime.record import RecordWriter, group_entries
from slime.utils.types import Sample

HOSTILE = "\x1b[2J\x1b]0;title\x07 \u202eevil" + "汉字" * 300
logger = logging.getLogger("slime.cluster.cluster")


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(panels, "_num_gpus", lambda: 0)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def run_of(tmp_path, *words: str, **changes):
    return parse("--run-dir", str(tmp_path / "run"), *words, **{"num_rollout": 12, **changes})


def play(args, shown: RunScreen, num_steps: int = 12) -> None:
    """What a run does, as far as a screen sees it."""
    run_dir = shown._run_dir
    run_dir.mkdir(parents=True)
    record_samples(run_dir, num_steps)
    with (
        log_to(run_dir / "logs" / "driver.log"),
        (run_dir / "metrics.jsonl").open("w", buffering=1) as metrics,
    ):
        with phases.starting(phases.CHECKS) as ended:
            ended.cost = ("trainer rank: 1.50 GiB",)
        for name in ("data", "engines", phases.FIRST_PUSH):
            with phases.starting(name):
                shown.update()
        for step in range(num_steps):
            with phases.doing("generating"):
                logger.info("rollout %d: LOGLINE", step, extra={"shown_elsewhere": True})
                print("a plug-in prints \x1b[31mred", "wide " * 60)
                print("NOISE of a library", file=sys.stderr)
                logging.getLogger("library").warning("NOISE of a library")
                logger.warning("a warning of slime: %s", "words " * 40)
                shown.update()
            row = {"step": step, "rollout/raw_reward": step / 12, "perf/step_time": 2.0}
            row |= {"rollout/num_samples": 8, "rollout/response_len/mean": 10.0}
            metrics.write(json.dumps(row) + "\n")
            shown.update()
        evidence = Advisory("cut", "90% of the answers were cut", "raise --rollout-max-response-len")
        logger.warning("advice: %s", evidence, extra={"advisory": evidence})


def record_samples(run_dir, num_steps: int) -> None:
    writer = RecordWriter(run_dir / "record.db", "run-1", 1 << 24)
    for step in range(num_steps):
        sample = Sample(group_index=0, index=0, prompt=HOSTILE, response=HOSTILE, label="4", reward=0.0)
        outcome = ("filtered", "zero_std") if step % 2 else ("trained",)
        writer.add("train", step, group_entries([[sample]], *outcome))
    writer.close()


def on_window(args, columns, rows, monkeypatch, act=play):
    window = Window(columns, rows)
    monkeypatch.setattr(sys, "stdout", window.stream)
    monkeypatch.setattr(screen, "Repeated", _Never)
    error = None
    try:
        with RunScreen(args) as shown:
            act(args, shown)
    except (RuntimeError, KeyboardInterrupt) as raised:
        error = raised
    monkeypatch.undo()
    return window.close(), error


class _Never:
    """Looks are taken by the test, at moments that it knows."""

    def __init__(self, look, name):
        self._look = look

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._look()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_a_run_on_a_terminal(tmp_path, monkeypatch, columns, rows):
    shown, error = on_window(run_of(tmp_path), columns, rows, monkeypatch)
    assert error is None
    lines = shown.lines()
    text = "\n".join(lines)
    assert "LOGLINE" not in text and "NOISE" not in text and "INFO" not in text
    # The panels have their frames, which a line that wraps would break.
    frames = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert len(frames) > 12 and all(len(line) == columns for line in frames)
    for words in (
        "4 prompts x 2 samples = 8",
        "nothing: the trained weights are lost",
        "trainer rank: 1.50 GiB",
        "✓ engines",
        "first push",
    ):
        assert words in text
    [line] = [line for line in lines if line.startswith("train ")]
    assert "12/12" in line and "reward 0.917" in line and "▁" in line and "40 tok/s" in line
    assert "advice 90% of the answers were cut" in text
    assert "a warning of slime" in text
    assert "0 at the start, 0.9167 at the end" in text and "slime samples" in text and "not saved" in text
    assert 1 <= text.count("· reward 0 ·") <= 3 and "filtered: zero_std" in text


def test_no_control_character_of_a_model_or_a_plug_in_reaches_the_terminal(tmp_path, monkeypatch):
    shown, _ = on_window(run_of(tmp_path), 80, 24, monkeypatch)
    assert "\x1b[2J" not in shown.written and "\x1b]0;" not in shown.written and "\x07" not in shown.written
    ours = re.compile(r"\x1b\[(\d+(;\d+)*m|\d*A|J)")
    assert "\x1b" not in ours.sub("", shown.written) and "\u202e" not in shown.written


def test_everything_is_in_the_log_of_the_driver(tmp_path, monkeypatch):
    on_window(run_of(tmp_path), 80, 24, monkeypatch)
    log = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert (
        log.count("a plug-in prints") == log.count("NOISE of a library") - log.count("WARNING: NOISE") == 12
    )


@pytest.mark.parametrize("raised", [KeyboardInterrupt("signal 15"), RuntimeError("engine died")])
def test_an_end_in_the_middle_leaves_no_live_line(tmp_path, monkeypatch, raised):
    def act(args, shown):
        play(args, shown, 4)
        with phases.doing("training"):
            shown.update()
            raise raised

    shown, error = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    assert error is raised
    lines = [line for line in shown.lines() if line]
    assert sum(line.startswith("train ") for line in lines) == 1 and lines[-1].startswith("╰")
    assert "ended early" in "\n".join(lines) and "4 of 12" in "\n".join(lines)
    assert shown.written.endswith("\n") and "\x1b[?25l" not in shown.written


def test_a_run_that_ends_before_its_first_step_shows_no_closing_panel(tmp_path, monkeypatch):
    def act(args, shown):
        with phases.starting("engines"):
            shown.update()
            raise RuntimeError("no engine")

    shown, _ = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    text = "\n".join(shown.lines())
    assert "starting" not in text and "ended early" not in text


@pytest.mark.parametrize("words", [(), ("--quiet",), ("--log-level", "error")])
def test_without_a_terminal_there_are_plain_lines(tmp_path, monkeypatch, capfd, words):
    monkeypatch.setattr(screen, "Repeated", _Never)
    args = run_of(tmp_path, *words)
    with RunScreen(args) as shown:
        play(args, shown)
    out, err = capfd.readouterr()
    assert "\x1b[" not in out.replace("\x1b[31mred", "") and "╭" not in out and "NOISE" not in err
    quiet, errors_only = words == ("--quiet",), "error" in words
    assert ("step 12/12  reward 0.917" in out) != quiet and out.count("a plug-in prints") == 12
    assert ("slime plot" in out) != quiet
    assert ("WARNING: advice: 90%" in err) != errors_only and "LOGLINE" not in err


def test_the_screen_is_restored_when_it_cannot_open(tmp_path, monkeypatch):
    def broken(*args):
        raise ValueError("no rows")

    before = (sys.stdout, sys.stderr)
    monkeypatch.setattr(screen, "Terminal", broken)
    with pytest.raises(ValueError, match="no rows"), RunScreen(run_of(tmp_path)):
        pass
    assert (sys.stdout, sys.stderr) == before


def test_what_cannot_be_shown_does_not_end_the_run(tmp_path, monkeypatch):
    def act(args, shown):
        play(args, shown, 2)
        (shown._run_dir / "metrics.jsonl").unlink()
        (shown._run_dir / "metrics.jsonl").mkdir()  # nothing that could be read
        shown.update()
        shown.update()

    shown, error = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    assert error is None and shown.written.count("The live view failed") == 1


def test_half_a_line_of_metrics_is_passed_over(tmp_path, monkeypatch):
    def act(args, shown):
        play(args, shown, 2)
        with (shown._run_dir / "metrics.jsonl").open("a") as metrics:
            metrics.write("no JSON\n")
        shown.update()
        shown.update()

    shown, error = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    assert error is None and "The live view failed" not in shown.written


def test_a_debugger_gets_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 6 * 7\nc\n"))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # Ray sets it, if a test before this one used Ray

    def act(args, shown):
        play(args, shown, 2)
        breakpoint()
        shown.update()
        print("no newline", end="")

    shown, error = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    assert (
        error is None and "(Pdb) 42" in shown.written.replace("\r\n", "\n") and "no newline" in shown.written
    )
    assert shown.written.index("train ") < shown.written.index("(Pdb)")


def test_every_advice_is_shown_and_warnings_before_the_first_step(tmp_path, monkeypatch):
    def act(args, shown):
        for number in range(8):
            logger.warning("before the start: %d", number)
        play(args, shown, 1)
        for number in range(8):
            advice = Advisory(f"cause {number}", f"evidence {number}", "do that")
            logger.warning("advice: %s", advice, extra={"advisory": advice})

    shown, _ = on_window(run_of(tmp_path), 80, 24, monkeypatch, act)
    text = "\n".join(shown.lines())
    assert all(f"before the start: {i}" in text and f"evidence {i}" in text for i in range(8))


@pytest.fixture
def outputs(monkeypatch):
    """What a kernel would show: a list of displays, each with all texts it has had."""
    found = []

    class Handle:
        def __init__(self, text):
            self.texts = [text]

        def update(self, data, *, raw):
            self.texts.append(data["text/plain"])

    def display(data, *, raw, display_id):
        found.append(Handle(data["text/plain"]))
        return found[-1]

    kernel = types.ModuleType("IPython")
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    shown = types.ModuleType("IPython.display")
    shown.display = display
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(screen, "Repeated", _Never)
    return found


def test_a_notebook_shows_a_run_as_one_updated_output_of_the_cell(tmp_path, monkeypatch, outputs):
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    args = run_of(tmp_path)
    with screen.RunScreen(args) as shown:
        play(args, shown)
    monkeypatch.undo()
    [live] = outputs
    assert live.texts[0].startswith("starting") and "12/12" in live.texts[-1]
    assert any("generating" in text for text in live.texts)
    text = cell.getvalue()
    assert "\x1b" not in text and "12/12" not in text and "NOISE" not in text
    assert "first push" in text and "advice 90% of the answers were cut" in text
    assert text.splitlines()[-1].startswith("finished: reward 0 -> 0.9167, 12 steps in ")


def test_only_a_kernel_is_a_notebook(monkeypatch):
    for found in (None, types.SimpleNamespace()):
        module = types.ModuleType("IPython")
        module.get_ipython = lambda found=found: found
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
