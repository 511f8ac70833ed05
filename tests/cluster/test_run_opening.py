"""A run folder belongs to one run: only resuming continues it, and every line says whose it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from argument_helpers import parse
from small_disk import mounted

from slime.cli.inspect.status import status_main
from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.cluster.run_opening import claimed, close_run, nothing_left, open_run, refuse_taken
from slime.observability.tracking import Tracker, read_metrics
from slime.record import RecordWriter, group_entries
from slime.utils.errors import FolderInUse, RunStopped
from slime.utils.files.folder_lock import FolderLock
from slime.utils.files.run_file import read_run
from slime.utils.files.step_folders import Manifest, find_step
from slime.utils.types import Sample


def start(folder, *, log=True, error=None, **flags):
    """One start of a run that logs a line and ends."""
    args = parse(run_dir=str(folder), **flags)
    checkpoint = find_step(args.load, args.ckpt_step) if args.load else None
    run = open_run(args, checkpoint)
    with Tracker(args, run.run_dir) as tracker:
        if log:
            tracker.log({"train/loss": 0.5}, "train/step", 0)
    if args.save and log:
        write_checkpoint(args.save, Manifest(run.num_starts, run.run_id, 1), {}, lambda path: path.mkdir(), 0)
    close_run(run, error)
    return run


def test_run_json_says_what_the_run_is(tmp_path):
    run = start(tmp_path / "fine", lr=0.25)
    data = json.loads((tmp_path / "fine" / "run.json").read_text())
    assert (data["id"], data["name"], data["exit"], data["earlier"]) == (run.run_id, "fine", "finished", [])
    assert data["settings"]["lr"] == {"value": 0.25, "source": "command line"}
    assert data["start"] <= data["end"] and "torch" in data["versions"] and data["machine"]["host"]


def test_every_line_carries_the_run(tmp_path):
    run = start(tmp_path)
    assert [(line["run"], line["start"]) for line in read_metrics(tmp_path)] == [(run.run_id, 1)]


def test_a_new_run_in_a_used_folder_is_refused_and_changes_nothing(tmp_path):
    folder, saving = tmp_path / "run", {"save": str(tmp_path / "ckpt")}
    first = start(folder, lr=0.25, **saving)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        FolderInUse, match=f"--run-dir .* belongs to run {first.run_id}, .*finished.*another folder, or "
    ):
        start(folder, lr=0.5, **saving)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_nobody_is_sent_to_checkpoints_that_a_run_never_wrote(tmp_path):
    start(tmp_path, error=KeyboardInterrupt())
    with pytest.raises(FolderInUse, match="That run had no --save: there is nothing to resume from"):
        start(tmp_path)


def test_a_resumed_run_continues_its_folder(tmp_path):
    flags = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    first = start(tmp_path / "run", **flags, lr=0.25)
    second = start(tmp_path / "run", **flags, lr=0.5, error=KeyboardInterrupt())
    assert (second.run_id, second.num_starts) == (first.run_id, 2)
    assert [(line["run"], line["start"]) for line in read_metrics(tmp_path / "run")] == [
        (first.run_id, n) for n in (1, 2)
    ]
    record = read_run(tmp_path / "run")
    assert [s.settings["lr"]["value"] for s in (*record.earlier, record.last)] == [0.25, 0.5]
    assert [s.exit for s in (*record.earlier, record.last)] == ["finished", "interrupted"]
    assert record.last.resumed["run"] == first.run_id and record.last.resumed["rollout"] == 1


def test_a_run_that_goes_on_otherwise_says_so(tmp_path, caplog):
    flags = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    start(tmp_path / "run", **flags, lr=0.25)
    start(tmp_path / "run", **flags, lr=0.25)
    assert "other settings" not in caplog.text
    start(tmp_path / "run", **flags, lr=0.5)
    assert "This run resumes with changed settings: lr 0.25 -> 0.5" in caplog.text


def test_weights_of_two_starts_never_have_one_version(tmp_path):
    flags = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    assert start(tmp_path / "run", **flags).pushes_as != start(tmp_path / "run", **flags).pushes_as


def test_a_start_that_was_killed_before_its_first_checkpoint_is_repeated_in_its_folder(tmp_path):
    flags = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    args = parse(run_dir=str(tmp_path / "run"), **flags)
    killed = open_run(args)
    with Tracker(args, killed.run_dir) as tracker:
        tracker.log({"train/loss": 0.5}, "train/step", 0)
    again = start(tmp_path / "run", **flags)
    assert again.run_id == killed.run_id
    assert read_run(tmp_path / "run").earlier[0].exit == "lost: the process ended without a word"


def test_checkpoints_of_another_run_do_not_open_the_folder(tmp_path):
    other = start(tmp_path / "other", save=str(tmp_path / "other-ckpt"))
    start(tmp_path / "run", save=str(tmp_path / "ckpt"))
    with pytest.raises(FolderInUse):
        start(tmp_path / "run", load=str(tmp_path / "other-ckpt"), save=str(tmp_path / "third"))
    with pytest.raises(FolderInUse):  # only the weights: a new run
        start(tmp_path / "run", load=str(tmp_path / "ckpt"), finetune=True)
    elsewhere = start(tmp_path / "new", load=str(tmp_path / "other-ckpt"), save=str(tmp_path / "third"))
    assert elsewhere.run_id != other.run_id and read_run(tmp_path / "new").last.resumed["run"] == other.run_id


def test_a_start_that_ended_before_it_logged_anything_leaves_its_folder_free(tmp_path):
    failed = start(tmp_path, log=False, error=ValueError("a bad row"))
    assert read_run(tmp_path).last.exit == "ValueError: a bad row"
    assert start(tmp_path).run_id != failed.run_id


def test_a_folder_of_an_earlier_version_is_continued_by_a_resume_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step_key": "train/step", "step": 0}\n')
    write_checkpoint(tmp_path / "ckpt", Manifest(0, "0ldrun", 1), {}, lambda path: path.mkdir(), 0)
    with pytest.raises(FolderInUse, match="an earlier run"):
        start(run)
    assert start(run, load=str(tmp_path / "ckpt")).run_id == "0ldrun"


def test_a_damaged_run_json_does_not_free_the_folder(tmp_path):
    start(tmp_path)
    (tmp_path / "run.json").write_text("{half")
    with pytest.raises(FolderInUse):
        start(tmp_path)


def test_a_folder_by_default_name_is_the_runs_own(tmp_path, monkeypatch):
    """Nobody named it, so nobody need be asked: a new run gets the next name, a resumed one finds its own."""
    monkeypatch.chdir(tmp_path)
    base = parse().run_dir
    start(base, save="ckpt")
    assert parse().run_dir == f"{base}-2"
    start(f"{base}-2", save="ckpt-2")
    assert parse().run_dir == f"{base}-3"
    assert parse(load="ckpt-2", save="ckpt-2").run_dir == f"{base}-2"
    assert parse(load="ckpt", save="ckpt").run_dir == base
    assert parse(load="ckpt", finetune=True).run_dir == f"{base}-3"
    Path(f"{base}-3").mkdir()
    lock = FolderLock(Path(f"{base}-3"), "--run-dir")
    assert parse().run_dir == f"{base}-4", "a run that has logged nothing yet is there"
    lock.release()


def test_metrics_of_a_plug_in_in_another_process_carry_the_run_too(tmp_path):
    run = start(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from argument_helpers import declared; from slime.observability import logging_utils\n"
        "args = declared(run_dir=sys.argv[2]); logging_utils.log(args, {'x': 1}, 'x/step', 0); "
        "logging_utils.finish_tracking()"
    )
    tests = str(Path(__file__).parents[1] / "support")
    subprocess.run([sys.executable, "-c", code, tests, str(tmp_path)], check=True, env={**os.environ})
    assert read_metrics(tmp_path)[-1]["run"] == run.run_id


def test_metrics_on_a_full_disk_are_told(tmp_path):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        run = open_run(parse(run_dir=str(disk)))
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        tracker = Tracker(parse(run_dir=str(disk)), run.run_dir)
        with pytest.raises(RunStopped, match="metrics cannot be written"):
            for step in range(200):
                tracker.log({"text": "x" * 1000}, "train/step", step)
        tracker.finish()


def test_how_a_run_ended_is_told_on_a_full_disk_too(tmp_path, capsys):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        run = open_run(parse(run_dir=str(disk)))
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        close_run(run, RunStopped("metrics cannot be written: the disk is full"))
        assert read_run(disk).last.exit == "RunStopped: metrics cannot be written: the disk is full"
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "run.json"]
        assert status_main([str(disk)]) == 0
        assert "metrics cannot be written: the disk is full" in capsys.readouterr().out


def test_room_for_the_last_words_of_a_killed_start_is_used_again(tmp_path):
    args = parse(run_dir=str(tmp_path))
    open_run(args)
    run = open_run(args)
    room = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(room) == 2 and max(room.values()) > room["run.json"] + 30_000
    close_run(run, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_very_run_that_has_finished_has_nothing_left_to_do(tmp_path):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "ckpt")}
    assert nothing_left(parse(**flags)) is None
    start(tmp_path / "run", save=flags["save"])
    told = nothing_left(parse(**flags))
    assert f"--run-dir {tmp_path / 'run'} holds this very run, and it has finished" in told
    assert "give other folders" in told and "larger --num-rollout" in told
    for other in ({"lr": 0.5}, {"auto_resume": False}, {"finetune": True}, {"save": str(tmp_path / "new")}):
        assert nothing_left(parse(**flags | other)) is None, other
    for folder in (tmp_path / "ckpt").iterdir():
        folder.rename(tmp_path / folder.name)
    assert nothing_left(parse(**flags)) is None, "its checkpoints are gone"


def test_a_run_whose_driver_failed_or_was_killed_has_something_left_to_do(tmp_path):
    flags = {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "ckpt")}
    start(tmp_path / "run", save=flags["save"], error=KeyboardInterrupt())
    assert nothing_left(parse(**flags)) is None
    open_run(parse(**flags))  # and killed
    assert nothing_left(parse(**flags)) is None


def test_runs_that_are_started_together_choose_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, third = parse(), parse(), parse()
    assert first.run_dir == second.run_dir, "nothing is written while settings are read"
    with claimed(first) as first, claimed(second) as second, claimed(parse(run_dir="mine")) as given:
        assert given.run_dir == str(tmp_path / "mine"), "what was given stays"
        folders = [Path(args.run_dir).name for args in (first, second)]
        assert folders == ["model-1234", "model-1234-2"]
        assert parse().run_dir == str(tmp_path / "runs" / "model-1234-3")
        start(first.run_dir)  # and is over before the next one has chosen
        with claimed(third) as third:
            assert Path(third.run_dir).name == "model-1234-3"
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert left == ["model-1234"], "folders that nobody used are removed"


def test_a_run_that_is_resumed_keeps_its_automatic_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start(parse().run_dir, save="ckpt", error=KeyboardInterrupt())
    with claimed(parse(save="ckpt")) as resumed, claimed(parse(save="other")) as other:
        assert Path(resumed.run_dir).name == "model-1234" and resumed.load is not None
        assert Path(other.run_dir).name == "model-1234-2"


def test_a_place_for_runs_that_cannot_be_written_is_left_to_those_who_report_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with claimed(parse()) as args:
        assert args.run_dir == str(tmp_path / "runs" / "model-1234")


def test_a_finished_run_by_default_name_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = parse().run_dir
    start(base, save="ckpt")
    assert base in nothing_left(parse(save="ckpt"))
    assert parse(save="other").run_dir == f"{base}-2"


def test_a_run_that_is_past_its_last_step_has_nothing_left_to_do(tmp_path):
    flags = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    for rollout in (3, 87):
        write_checkpoint(tmp_path / "ckpt", Manifest(rollout, "run", 1), {}, lambda path: path.mkdir(), 0)
    told = nothing_left(parse(**flags, num_rollout=12))
    assert "nothing is left to do: --num-rollout is 12" in told and "has 88 steps already" in told
    assert nothing_left(parse(**flags, num_rollout=88)) is None, "an evaluation may be left"
    assert nothing_left(parse(**flags, num_rollout=12, ckpt_step=3)) is None
    assert nothing_left(parse(**flags, num_rollout=12, finetune=True)) is None
    assert nothing_left(parse(save=str(tmp_path / "ckpt"), num_rollout=12)) is None
    for file in (tmp_path / "ckpt" / "step_0000087").iterdir():
        file.write_text("") if file.is_file() else file.rmdir()
    assert nothing_left(parse(**flags, num_rollout=12)) is None, "it goes on from the one before"


def test_a_record_of_another_run_is_refused_and_left_as_it_is(tmp_path):
    file = tmp_path / "run" / "record.db"
    file.parent.mkdir()
    writer = RecordWriter(file, "another", 1 << 20)
    writer.add("train", 0, group_entries([[Sample(index=0, group_index=0, prompt="a")]], "trained"))
    writer.close()
    before = file.read_bytes()
    with pytest.raises(FolderInUse, match="is the record of run another, this is a new run; use another"):
        refuse_taken(parse(run_dir=str(file.parent)))
    assert file.read_bytes() == before
    refuse_taken(parse(run_dir=str(file.parent), record_max_mib=0))
    file.unlink()
    file.mkdir()
    with pytest.raises(FolderInUse, match="is not a file"):
        refuse_taken(parse(run_dir=str(file.parent)))


def test_the_same_command_goes_on_with_a_run_that_did_not_finish(tmp_path):
    folder, flags = tmp_path / "run", {"save": str(tmp_path / "ckpt"), "lr": 0.25}
    first = start(folder, error=RunStopped("the engines are gone"), **flags)
    second = start(folder, error=KeyboardInterrupt(), **flags)
    assert (second.run_id, second.num_starts) == (first.run_id, 2)
    with pytest.raises(FolderInUse, match="belongs to run"):
        start(folder, **{**flags, "lr": 0.5})
    with pytest.raises(FolderInUse, match=r"because its settings differ: --lr 0\.5 \(was 0\.25\)\."):
        refuse_taken(parse(run_dir=str(folder), **{**flags, "lr": 0.5}))
    third = start(folder, **flags)
    assert third.num_starts == 3
    with pytest.raises(FolderInUse, match="finished"):
        start(folder, **flags)
