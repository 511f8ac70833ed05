"""The quick-start command: its flags, its folder and its exit code."""

import contextlib
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from slime.cli.quickstart import command
from slime.cli.quickstart.command import opened, set_aside
from slime.cli.quickstart.display import Screen
from slime.cli.quickstart.two_runs import RECIPES
from slime.utils.errors import FolderInUse


class Reached(BaseException):
    """The training would have begun."""


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    def reached(args):
        raise Reached

    monkeypatch.setattr(command, "run_loop", reached)
    monkeypatch.setattr(command, "run_overlapped", reached)
    # Nothing is started: no fork server needs to import what children need.
    monkeypatch.setattr(command, "warm_starts", contextlib.nullcontext)
    # The conversations of the warm-up are most of the data; here some of them do.
    short = replace(RECIPES["tiny"].warm_up, num_chunks=1)
    monkeypatch.setitem(RECIPES, "tiny", replace(RECIPES["tiny"], warm_up=short))


def options(*argv):
    return command.parse_options(argv)


def test_other_flags_are_kept_for_the_rl_run():
    parsed = options("--seed", "3", "--rollout-engine", "sglang", "--run-dir", "somewhere")
    assert parsed.seed == 3 and parsed.run_dir == Path("somewhere")
    assert parsed.extra == ("--rollout-engine", "sglang")


@pytest.mark.parametrize(
    "argv",
    [
        ("--model", "huge"),
        ("--hf-checkpoint", "x"),
        ("--num-rollout", "1"),
        ("--require-accuracy", "90"),
        ("--require-accuracy", "nan"),
    ],
)
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


FINISHED = (
    "rl/metrics.jsonl",
    "rl/hf-49/model.safetensors",
    "data/rl.jsonl",
    "summary.json",
    "curve.png",
    "log.txt",
)


def write_finished(run_dir):
    """What a quick start leaves, in files that say so, and one of the user's own."""
    for name in (*FINISHED, "notes.txt"):
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"old {name}")
    return snapshot(run_dir)


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--lr", "abc"),
        ("--advantage-estimatr", "grpo"),
        ("--rollout-batch-size", "0"),
        ("--prompt-data", "nowhere.jsonl"),
        ("--custom-rm-path", "nowhere.reward"),
        ("--runtime", "moon"),
        ("--config", "nowhere.yaml"),
        pytest.param(("--skip-eval-before-train",), marks=pytest.mark.slow),
        ("--eval-interval", "1000"),
        ("stray",),
        ("--print-config",),
    ],
    ids=" ".join,
)
def test_wrong_flags_leave_a_finished_quick_start_as_it_is(tmp_path, wrong):
    before = write_finished(tmp_path)
    with pytest.raises(SystemExit):
        command.main(["--run-dir", str(tmp_path), *wrong])
    assert snapshot(tmp_path) == before


def test_a_new_quick_start_moves_what_an_earlier_one_left_aside(tmp_path, capsys):
    before = write_finished(tmp_path)
    with pytest.raises(Reached):
        command.main(["--run-dir", str(tmp_path)])
    now = snapshot(tmp_path)
    assert {name: now[f"earlier/1/{name}"] for name in FINISHED} == {name: before[name] for name in FINISHED}
    assert now["notes.txt"] == b"old notes.txt"
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "rl").exists()
    assert "earlier/1" in capsys.readouterr().out.replace("\n", "")  # a long path is wrapped


def test_every_earlier_quick_start_keeps_a_folder_of_its_own(tmp_path):
    for i in (1, 2, 3):
        write_finished(tmp_path)
        (tmp_path / "summary.json").write_text(str(i))
        assert set_aside(tmp_path) == tmp_path / "earlier" / str(i)
    assert [(tmp_path / "earlier" / str(i) / "summary.json").read_text() for i in (1, 2, 3)] == [
        "1",
        "2",
        "3",
    ]
    assert set_aside(tmp_path) is None


def test_a_second_quick_start_in_the_same_folder_leaves_the_first_alone(tmp_path):
    with opened(tmp_path) as earlier:
        assert earlier is None
        before = write_finished(tmp_path)
        with pytest.raises(FolderInUse, match="is in use by process"), opened(tmp_path):
            pytest.fail("moved what is being written")
        assert {name: text for name, text in snapshot(tmp_path).items() if name in before} == before


def test_folders_that_no_quick_start_made_are_not_touched(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds data/, which no quick start made"):
        set_aside(tmp_path)
    assert (tmp_path / "data" / "mine.jsonl").read_text() == "years of work"


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--run-dir", str(tmp_path / "file" / "run")])
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --run-dir ") and shown.count("\n") == 1


@pytest.mark.parametrize(("required", "code"), [(None, 0), (0.9, 0), (0.96, 1)])
def test_the_exit_code_says_whether_the_required_accuracy_was_reached(required, code):
    argv = [] if required is None else ["--require-accuracy", str(required)]
    screen = Screen(Console(file=io.StringIO()))
    assert command.verdict({"accuracy_after": 0.95}, options(*argv), screen) == code


def test_an_interpreter_without_docstrings_is_told_before_anything_is_made(tmp_path):
    words = ["-OO", "-m", "slime", "quickstart", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "unset it, or set it to 1" in done.stderr and not (tmp_path / "run").exists()
