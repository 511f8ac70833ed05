"""`slime samples`: answers from a run's record, on a screen and in a pipe, whatever a model wrote."""

import json

import pytest

from slime.cli.main import main
from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.utils.files.run_file import open_run_file
from slime.utils.printable import cut_lines, printable
from slime.utils.types import Sample

HOSTILE = "\x1b[2J\x1b]0;title\x07[bold]red[/bold] \u202eevil\x00"


@pytest.fixture
def run_dir(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run-1", 1 << 24)
    for step, answer in ((0, "five"), (1, "four")):
        groups = [[_sample(0, answer, step)], [_sample(1, HOSTILE, 0.5, prompt="be evil")]]
        writer.add("train", step, group_entries(groups, "trained"))
        writer.add("eval", step, group_entries([[_sample(2, answer, 1.0)]], "evaluated", dataset="held"))
    writer.add("train", 2, group_entries([[_sample(3, "same", 1.0, "other")]], "filtered", "zero_std_1.0"))
    writer.close()
    return str(tmp_path)


def _sample(group, response, reward, prompt="2+2="):
    return Sample(
        group_index=group,
        index=group,
        prompt=prompt,
        response=response,
        response_length=3,
        label="4",
        reward=float(reward),
        status=Sample.Status.COMPLETED,
    )


def test_the_worst_answers_of_a_step(run_dir, capsys):
    assert main(["samples", run_dir, "--step", "0", "--worst", "1"]) == 0
    out = capsys.readouterr().out
    assert "step 0" in out and "five" in out and "reward 0" in out and "label 4" in out and "evil" not in out


def test_why_a_group_was_dropped_is_shown(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["samples", run_dir, "--outcome", "filtered"]) == 0
    assert "filtered: zero_std_1.0" in capsys.readouterr().out


def test_the_same_prompt_early_and_late(run_dir, capsys):
    assert main(["samples", run_dir, "--diff", "0", "1"]) == 0
    out = capsys.readouterr().out
    assert out.index("five") < out.index("four")


def test_json_lines_have_everything(run_dir, capsys):
    assert main(["samples", run_dir, "--contains", "EVIL", "--json", "--limit", "1"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["response"] == HOSTILE and row["prompt"] == "be evil"


def test_what_a_model_wrote_never_reaches_the_terminal_as_control_characters(run_dir, capsys):
    assert main(["samples", run_dir, "--contains", "evil"]) == 0
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\x00", "\u202e"}
    assert "[bold]red[/bold]" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "77"], "no sample matches; it has steps 0 to 2"),
        (["--diff", "0", "2"], "no prompt in common; step 1 repeats prompts of step 0: --diff 0 1."),
        (["--contains", "nowhere"], "no sample matches"),
    ],
)
def test_nothing_found_is_said_with_what_there_is(run_dir, capsys, words, message):
    assert main(["samples", run_dir, *words]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_a_record_is_one_line(tmp_path, capsys):
    assert main(["samples", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "is no folder of a run" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["samples", "status", "plot"])
def test_runs_that_lie_in_a_folder_that_is_none_are_named(tmp_path, capsys, command):
    for name in ("rl", "sft"):
        (tmp_path / name).mkdir()
        open_run_file(tmp_path / name, {}, None, None, None)
    assert main([command, str(tmp_path)]) == 2
    assert f"In it are the runs {tmp_path / 'rl'}, {tmp_path / 'sft'}." in capsys.readouterr().err


def test_where_training_repeats_no_prompt_evaluations_to_compare_are_named(tmp_path, capsys):
    open_run_file(tmp_path, {}, None, None, None)
    writer = RecordWriter(tmp_path / RECORD_FILE, "run", 1 << 20)
    for step in (0, 4, 9):
        question = Sample(index=0, group_index=0, prompt="2+2=", response=str(step), reward=1.0)
        fresh = Sample(index=1, group_index=1, prompt=f"{step}+1=", response="?", reward=0.0)
        writer.add("eval", step, group_entries([[question]], "evaluated", dataset="held"))
        writer.add("train", step, group_entries([[fresh]], "trained"))
    writer.close()
    assert main(["samples", str(tmp_path), "--diff", "1", "8"]) == 1
    assert "evaluations of steps 0, 4, 9 have: --diff 0 9." in capsys.readouterr().err
    assert main(["samples", str(tmp_path), "--diff", "0", "9"]) == 0


@pytest.mark.parametrize("word", ["0", "-1", "many", "²", "9" * 20])
def test_a_count_that_is_none_is_refused(run_dir, capsys, word):
    with pytest.raises(SystemExit):
        main(["samples", run_dir, "--worst", word])
    assert "is not a whole number from 1 to 1e+09" in capsys.readouterr().err
    assert main(["samples", run_dir, "--step", "9" * 20]) == 1  # no step of SQLite


def test_texts_are_cut_to_lines():
    assert cut_lines("a\nb", 3, 10) == "a\nb"
    assert cut_lines("x" * 25, 2, 10) == "x" * 10 + "\n... (15 more characters)"
    assert printable("a\tb\n\x1b") == "a\tb\n\u241b"
