"""`slime ledger`: audit and show report what they found, and end accordingly."""

import json
import sqlite3

import pytest
from ledger_world import MIB, World, full_disk, group_of

from slime.cli.inspect import ledger as command
from slime.record import RecordWriter
from slime.record.audit import audit
from slime.utils.files.run_file import RunRecord, Start, open_run_file, write_run


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.stop()


def test_an_audit_as_json_is_json(world, capsys):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.stop()
    assert command.main(["audit", str(world.path.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"kept": 1} and found["violations"] == [] and found["num_samples"] == 2


def test_what_a_full_disk_took_from_the_ledger_is_told_once_and_missing_samples_are_no_loss(world, capsys):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.writer.flush()
    world.writer._write = full_disk  # the samples of step 1: its events are there
    world.step(1, [group_of(1)], commit=True)
    world.make(2, [group_of(2)])
    world.writer.flush()
    world.writer._write_notes = full_disk  # that step 2 was trained
    world.ledger.trained(2)
    world.start(committed=2, last_made=2)
    world.step(3, [group_of(3)], commit=True)
    world.step(4, [group_of(4)], commit=True)
    found = world.audit()
    assert found.unrecorded == [1, 2] and len(found.violations) == 2
    assert "1 events could not be written" in found.violations[0]
    assert "start 2 resumed from the checkpoint after step 2" in found.violations[1]
    assert "no event of the training of steps [2]" in found.violations[1]
    assert command.main(["audit", str(world.path.parent)]) == 1
    assert "steps [1, 2]: samples are missing" in capsys.readouterr().out


def test_the_command_says_what_it_found_and_ends_accordingly(world, capsys, tmp_path):
    world.start()
    world.step(0, [group_of(0)])
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "conserved: every group has one outcome" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "1"]) == 0
    assert "tokens    [5, 6, 7]" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "9"]) == 2
    assert "step 0 has no sample 9; it has 0 to 1." in capsys.readouterr().err
    for step in ("4", "-1", str(1 << 70), str(-(1 << 70))):
        assert command.main(["show", str(tmp_path), "--step", step]) == 2
        assert f"the record has no samples of step {step}." in capsys.readouterr().err
    assert command.main(["audit", str(world.path)]) == 2
    assert "record.db is a file; give the folder of a run." in capsys.readouterr().err
    world.start()
    world.ledger.trained(0)
    world.ledger.trained(0)
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 1
    assert "VIOLATION: step 0 was trained twice" in capsys.readouterr().out
    assert command.main(["audit", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("words", [["audit"], ["show", "--step", "0"]])
def test_a_folder_that_holds_runs_is_told_with_their_names(tmp_path, capsys, words):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert command.main([*words, str(tmp_path)]) == 2
    shown = capsys.readouterr()
    if words == ["audit"]:
        assert shown.out == f"{tmp_path / 'one'}:\n{tmp_path / 'two'}:\n" and shown.err.count("error: ") == 2
    else:
        assert f"In it are the runs {tmp_path / 'one'}, {tmp_path / 'two'}." in shown.err


def test_an_audit_of_a_folder_of_runs_is_one_of_each(tmp_path, capsys):
    for name in ("runs/good", "runs/deeper/bad"):
        (tmp_path / name).mkdir(parents=True)
        made = World(tmp_path / name)
        write_run(tmp_path / name, RunRecord("run", "run", Start("now", {}, {}, {})))
        made.start()
        made.step(0, [group_of(0)])
        if name == "runs/deeper/bad":
            made.ledger.trained(0)
        made.stop()
    assert command.main(["audit", str(tmp_path / "runs")]) == 1
    good, bad = capsys.readouterr().out.split(f"{tmp_path}/runs/good:\n")[::-1]
    assert "conserved" in good and bad.startswith(f"{tmp_path}/runs/deeper/bad:\n") and "VIOLATION" in bad
    assert command.main(["audit", str(tmp_path / "runs"), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["run"] for line in lines] == [f"{tmp_path}/runs/deeper/bad", f"{tmp_path}/runs/good"]


@pytest.mark.parametrize("left", ["no record", "an empty file", "a file without tables"])
def test_a_run_that_was_killed_before_its_first_rollout_has_lost_nothing(tmp_path, capsys, left):
    open_run_file(tmp_path, {}, str(tmp_path / "ckpt"), None, None)
    if left == "an empty file":
        (tmp_path / "record.db").touch()
    elif left == "a file without tables":
        connection = sqlite3.connect(tmp_path / "record.db")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "there was no rollout yet" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert command.main(["audit", str(tmp_path)]) == 2, "it has logged a step: its record is lost"


def test_a_run_that_was_killed_before_its_first_event_has_lost_nothing(tmp_path, capsys):
    RecordWriter(tmp_path / "record.db", "run", MIB).close()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "the ledger is empty: there was no rollout yet" in capsys.readouterr().out
    assert audit(tmp_path / "record.db", finished=True).violations
