"""The quick-start command: its flags, its folder and its exit code."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from slime.cli.quickstart import command
from slime.cli.quickstart.display import Screen


def options(*argv):
    return command.parse_options(argv)


def test_other_flags_are_kept_for_the_rl_run():
    parsed = options("--seed", "3", "--rollout-engine", "sglang", "--run-dir", "somewhere")
    assert parsed.seed == 3 and parsed.run_dir == Path("somewhere")
    assert parsed.extra == ("--rollout-engine", "sglang")


@pytest.mark.parametrize("argv", [("--model", "huge"), ("--hf-checkpoint", "x"), ("--num-rollout", "1")])
def test_impossible_flags_end_with_exit_code_2(argv):
    with pytest.raises(SystemExit) as stopped:
        options(*argv)
    assert stopped.value.code == 2


def test_a_misspelt_flag_is_named_before_anything_is_trained(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--run-dir", str(tmp_path / "run"), "--advantage-estimatr", "grpo"])
    assert stopped.value.code == 2
    assert "--advantage-estimator" in capsys.readouterr().err
    assert not (tmp_path / "run" / "sft").exists()


def test_a_new_run_replaces_what_an_earlier_one_left_and_nothing_else(tmp_path):
    for name in ("rl/metrics.jsonl", "summary.json", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("old")
    command.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("required", "code"), [(None, 0), (0.9, 0), (0.96, 1)])
def test_the_exit_code_says_whether_the_required_accuracy_was_reached(required, code):
    argv = [] if required is None else ["--require-accuracy", str(required)]
    screen = Screen(Console(file=io.StringIO()))
    assert command.verdict({"accuracy_after": 0.95}, options(*argv), screen) == code
