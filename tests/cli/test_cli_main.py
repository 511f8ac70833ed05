"""The `slime` command: readable help, mistakes that end with one line and exit code 2, lazy subcommands."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from argument_helpers import base_argv

from slime.arguments.all_flags import GROUPS, all_specs
from slime.cli import main as cli
from slime.cli import train as cli_train
from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.utils.errors import EndedBySignal, RunStopped
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.step_folders import Manifest


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "slime", *words], capture_output=True, text=True, timeout=600
    )


def test_help_lists_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown and "quickstart" in shown and "docs" not in shown


def test_no_command_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "Train language models with reinforcement learning" in capsys.readouterr().out


def test_help_groups_commands_by_what_one_wants_and_passes_a_name_on(capsys):
    assert cli.main(["help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("get started:") < shown.index("quickstart") < shown.index("train a model:")
    for name in cli.COMMANDS:
        assert name == "docs" or f"  {name} " in shown
    with pytest.raises(SystemExit) as stop:
        cli.main(["help", "train", "reward"])
    assert stop.value.code == 0 and "--reward-key" in capsys.readouterr().out


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "slime train`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_explains_itself_and_makes_nothing(name, option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([name, option])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: slime ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_refuses_an_option_that_it_does_not_know_and_makes_nothing(
    name, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--no-such-option"])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_version_is_shown(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slime ")


def test_train_help_has_every_flag_under_its_subject(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "119")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for group in GROUPS:
        assert f"\n{group.__doc__.rstrip('.')}:\n" in shown
    for spec in all_specs().values():
        assert f"  {spec.option}" in shown
    assert max(len(line) for line in shown.splitlines()) <= 119


def test_misspelt_flag_is_told_before_what_is_missing_and_exit_code_2():
    done = run("train", "--rollout-batch-sise", "4")
    assert done.returncode == 2
    assert "unknown flag --rollout-batch-sise; did you mean --rollout-batch-size?\n" in done.stderr
    assert "is required" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_train_gets_the_parsed_settings():
    seen = []
    assert cli_train.main(base_argv(), train=seen.append) == 0
    assert seen[0].rollout_batch_size == 4


def test_a_folder_in_use_is_refused_before_anything_is_checked_or_shown(capsys, tmp_path):
    lock, seen = FolderLock(tmp_path, "--run-dir"), []
    with pytest.raises(SystemExit) as stop:
        cli_train.main([*base_argv(), "--run-dir", str(tmp_path)], train=seen.append)
    lock.release()
    shown = capsys.readouterr()
    assert (stop.value.code, shown.out, seen) == (2, "", [])
    assert f"--run-dir {tmp_path} is in use by process {os.getpid()}" in shown.err


def test_a_record_of_another_run_is_refused_before_anything_is_checked_or_shown(capsys, tmp_path):
    (tmp_path / "record.db").mkdir()
    seen = []
    with pytest.raises(SystemExit) as stop:
        cli_train.main([*base_argv(), "--run-dir", str(tmp_path)], train=seen.append)
    shown = capsys.readouterr()
    assert (stop.value.code, shown.out, seen) == (2, "", [])
    assert "record.db is not a file" in shown.err and not (tmp_path / "error.txt").exists()


def test_a_run_that_is_past_its_last_step_is_told_so_and_ends_well(capsys, tmp_path):
    write_checkpoint(tmp_path, Manifest(87, "run", 1), {}, lambda path: path.mkdir(), 0)
    words = [*base_argv(), "--save", str(tmp_path), "--load", str(tmp_path), "--num-rollout", "12"]
    seen = []
    assert cli_train.main(words, train=seen.append) == 0 and seen == []
    assert capsys.readouterr().out.startswith("nothing is left to do: --num-rollout is 12")


def test_user_mistake_while_training_is_one_line_and_keeps_the_details(capsys, tmp_path):
    def broken(args):
        raise ValueError("data.jsonl line 3: not JSON")

    with pytest.raises(SystemExit) as stop:
        cli_train.main([*base_argv(), "--run-dir", str(tmp_path / "run")], train=broken)
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert shown.startswith("error: data.jsonl line 3: not JSON\n")
    assert "Traceback" not in shown
    assert "in broken" in (tmp_path / "run" / "error.txt").read_text()


def test_defect_keeps_its_traceback():
    with pytest.raises(KeyError), cli.user_errors():
        raise KeyError("x")


def test_user_errors_without_an_error_does_nothing():
    with cli.user_errors():
        pass


def test_help_of_the_command_loads_no_torch():
    code = "import sys; from slime.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["help", "plot"]])
def test_a_reader_who_has_enough_of_the_help_sees_no_traceback(words):
    read, write = os.pipe()
    os.close(read)  # nobody reads: the first write fails
    command = [sys.executable, "-m", "slime", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode in (0, 1) and done.stderr == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (EndedBySignal(signal.SIGTERM), 143),
        (EndedBySignal(signal.SIGHUP), 129),
        (ValueError("a flag"), 2),
        (RunStopped("no engine"), 1),
    ],
)
def test_a_terminal_that_is_gone_changes_nothing_of_how_a_command_ends(error, code, monkeypatch):
    ours, theirs = pty.openpty()
    gone = open(theirs, "w")  # noqa: SIM115 - to close it writes, which fails
    os.close(ours)
    monkeypatch.setattr(sys, "stderr", gone)
    with pytest.raises(SystemExit) as end, cli.user_errors():
        raise error
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        gone.close()
    assert end.value.code == code


def test_a_process_that_ends_is_not_searched_for_cycles():
    """That takes seconds where much was imported; whoever calls `main` with arguments goes on."""
    program = """
import atexit, gc, sys
from slime.cli.main import main
main(["--version"])
assert gc.isenabled() and not gc.get_freeze_count()
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 1000))
sys.argv = ["slime", "--version"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True True"


def test_a_closed_output_is_no_error():
    command = f"exec {sys.executable} -m slime --help >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_knows_only_ascii_gets_the_nearest_characters(tmp_path, monkeypatch):
    row = {"step_key": "rollout/step", "step": 0, "rollout/raw_reward": 0.0}
    rows = [row, row | {"step": 1, "rollout/raw_reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run("plot", str(tmp_path))
    assert done.returncode == 0 and " _# 0 -> 1 (steps 0 to 1)" in done.stdout, done.stdout + done.stderr
