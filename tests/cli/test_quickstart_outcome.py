"""What a quick-start run left behind becomes numbers, tables, a plot and a summary."""

import io
import json
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from slime.catalog.loss_types import REWARD, Curve
from slime.cli.quickstart.display import Screen
from slime.cli.quickstart.outcome import read_outcome, summarise, write_summary
from slime.cli.quickstart.tasks import SORT_DIGITS, Problem, write_data
from slime.cli.quickstart.two_runs import RECIPES
from slime.observability.terminal.progress import Progress
from slime.record import Entry, RecordWriter
from slime.utils.types import Sample

QUESTIONS = [Problem("213>", "123"), Problem("312>", "123")]
RECORDS = [
    {"step": 1, "rollout/weight_version": 1},
    {"step": 0, "eval/heldout_greedy": 0.125, "eval/heldout_sampled": 0.0625},
    {"step": 0, "rollout/raw_reward": 0.25, "rollout/num_samples": 512},
    {"step": 0, "train/loss": 0.1},
    {"step": 0, "rollout/raw_reward": 0.25},
    {"step": 2, "rollout/weight_version": 2},
    {"step": 1, "rollout/raw_reward": 0.75, "rollout/num_samples": 512},
    {"step": 3, "rollout/weight_version": 3},
    {"step": 1, "eval/heldout_greedy": 1.0, "eval/heldout_sampled": 0.875},
]


def answer(prompt, response, *, dataset="heldout_greedy"):
    sample = Sample(prompt=prompt, response=response, label="123", reward=0.0)
    return Entry((sample,), "evaluated", dataset=dataset)


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", RECORDS)
    sampled = answer("312>", "sampled", dataset="heldout_sampled")
    writer = RecordWriter(tmp_path / "record.db", "run-1", 1 << 24)
    writer.add("eval", 0, [answer("213>", "123"), answer("<user>312></user>", "213"), sampled])
    writer.add("eval", 1, [answer("213>", "123"), answer("<user>312></user>", "123"), sampled])
    writer.close()
    return tmp_path


def plain_screen():
    output = io.StringIO()
    return Screen(Console(file=output, width=100)), output


def test_the_first_evaluation_is_before_and_the_last_is_after(run_dir):
    outcome = read_outcome(run_dir, QUESTIONS)
    assert outcome.accuracy == {"greedy": [0.125, 1.0], "sampled": [0.0625, 0.875]}
    assert outcome.eval_steps == [0, 2]
    assert outcome.rewards == [0.25, 0.75]


def test_changed_greedy_answers_are_shown_first_and_without_the_chat_template(run_dir):
    examples = read_outcome(run_dir, QUESTIONS).examples
    assert [(e.prompt, e.before, e.after) for e in examples] == [
        ("312>", "213", "123"),
        ("213>", "123", "123"),
    ]


def test_a_run_evaluated_once_is_refused(run_dir):
    write_lines(run_dir / "metrics.jsonl", RECORDS[:2])
    with pytest.raises(ValueError, match="fewer than two evaluations"):
        read_outcome(run_dir, QUESTIONS)


def test_the_summary_holds_what_was_measured(run_dir, tmp_path):
    recipe = RECIPES["tiny"]
    files = write_data(recipe.task, tmp_path / "data", seed=0, num_sft=10, num_rl=10)
    summary = summarise(
        read_outcome(run_dir, QUESTIONS), recipe, files, seed=7, control=None, estimator="rloo", wall_s=12.34
    )
    write_summary(summary, tmp_path / "summary.json")
    stored = json.loads((tmp_path / "summary.json").read_text())
    expected = {
        "accuracy_before": 0.125,
        "accuracy_after": 1.0,
        "reward_before": 0.0625,
        "reward_after": 0.875,
        "wall_s": 12.3,
        "num_samples": 1024,
        "weight_pushes": 3,
        "seed": 7,
        "advantage_estimator": "rloo",
        "num_held_out": files.num_held_out,
    }
    assert expected.items() <= stored.items()


def test_the_report_shows_numbers_answers_and_honest_words(run_dir):
    screen, output = plain_screen()
    screen.show_outcome(read_outcome(run_dir, QUESTIONS), SORT_DIGITS, num_held_out=512, control=None)
    text = " ".join(output.getvalue().split())
    for expected in ("12.5%", "100.0%", "87.5%", "512 questions", "312>", "known behaviour to choose"):
        assert expected in text


def test_the_report_of_a_control_says_whether_accuracy_rose_without_the_reward(run_dir):
    outcome = read_outcome(run_dir, QUESTIONS)
    fallen = replace(outcome, accuracy={"greedy": [0.3, 0.1], "sampled": [0.2, 0.0]})
    for shown, expected in ((outcome, "rose anyway"), (fallen, "did not rise")):
        screen, output = plain_screen()
        screen.show_outcome(shown, SORT_DIGITS, num_held_out=512, control="random-reward")
        assert expected in output.getvalue()


def test_without_a_terminal_progress_is_plain_lines(tmp_path):
    screen, output = plain_screen()
    phase = Progress(2, "RL", REWARD, done_key=REWARD.metric)
    with screen.following(phase, tmp_path / "metrics.jsonl"):
        write_lines(tmp_path / "metrics.jsonl", RECORDS)
    lines = output.getvalue().splitlines()
    assert lines.count("  step 1/2  reward 0.250") == lines.count("  step 2/2  reward 0.750") == 1
    assert "  held-out accuracy: greedy 100.0%, sampled 87.5%" in lines
    assert "\x1b" not in output.getvalue()


def test_on_a_terminal_the_line_shows_the_latest_reward(tmp_path):
    output = io.StringIO()
    screen = Screen(Console(file=output, force_terminal=True, width=100))
    phase = Progress(2, "RL", REWARD, done_key=REWARD.metric)
    with screen.following(phase, tmp_path / "metrics.jsonl"):
        write_lines(tmp_path / "metrics.jsonl", RECORDS)
    assert "reward 0.750" in output.getvalue() and "held-out 100.0%" in output.getvalue()


def test_a_quiet_one_shows_no_progress(tmp_path):
    output = io.StringIO()
    screen = Screen(Console(file=output, force_terminal=True, width=100), quiet=True)
    with screen.following(
        Progress(2, "RL", REWARD, done_key=REWARD.metric),
        tmp_path / "metrics.jsonl",
    ):
        write_lines(tmp_path / "metrics.jsonl", RECORDS)
    assert output.getvalue() == ""


def test_a_failing_run_is_not_swallowed_and_leaves_no_thread(tmp_path):
    screen, _ = plain_screen()
    phase = Progress(2, "RL", Curve("x", "x"), done_key="x")
    with (
        pytest.raises(RuntimeError, match="engine died"),
        screen.following(phase, tmp_path / "metrics.jsonl"),
    ):
        raise RuntimeError("engine died")
    assert "quickstart-metrics" not in {thread.name for thread in threading.enumerate()}
