"""A record whose run folder is on a network: written to a local disk, copied to the run folder."""

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
from dataclasses import replace

import pytest
from argument_helpers import parse
from ledger_world import MIB, World, group_of

from slime.cli.inspect import ask as ask_command
from slime.cli.inspect import ledger as ledger_command
from slime.cli.inspect import samples as samples_command
from slime.cli.inspect import status as status_command
from slime.cluster.recording import Recording
from slime.dashboard.run_folder import RunFolder
from slime.dashboard.trouble import trouble_of
from slime.record import RecordError, RecordWriter, place, record_file
from slime.record.actions import ASKED, DONE, ask, read_actions
from slime.rollout.ledger import Ledger
from slime.utils.files.run_file import open_run_file, write_run
from slime.utils.machine.run_identity import Run


class Steps(World):
    """Steps of a run, written through its recording."""

    def __init__(self, folder, recording):
        super().__init__(folder)
        self.writer = recording.writer
        self.ledger = Ledger(recording.writer, "s")
        self.ledger.resumed(-1, -1)


@pytest.fixture
def folder(tmp_path):
    """The folder of a run, on what counts as a network file system."""
    made = tmp_path / "run"
    made.mkdir()
    run = open_run_file(made, {}, None, None, None)
    write_run(made, replace(run, id="run"))
    return made


def start(folder, local, number=1):
    recording = Recording(
        Run("run", folder, "shm", number), parse(run_dir=str(folder), record_dir=str(local))
    )
    recording.flush()
    return recording


def killed_after_a_checkpoint(folder, local):
    """A start that was killed in step 3, after a checkpoint of step 2."""
    recording = start(folder, local)
    steps = Steps(folder, recording)
    steps.step(0, [group_of(0)])
    steps.step(1, [group_of(1)])
    recording.flush()
    assert recording.copy()
    steps.step(2, [group_of(2)])
    recording.flush()
    return recording


def steps_in(file):
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return [step for (step,) in connection.execute("SELECT rollout_id FROM rollouts ORDER BY 1")]


def test_the_record_of_a_local_run_folder_lies_in_it(folder):
    recording = Recording(Run("run", folder, "shm", 1), parse(run_dir=str(folder)))
    assert record_file(folder) == folder / "record.db" and record_file(folder).exists()
    assert not recording.copy()
    recording.close()
    assert not (folder / "record.json").exists() and record_file(folder).exists()


def test_network_file_systems_are_known_by_their_types(tmp_path):
    assert place.file_system_of(tmp_path / "not-there") == place.file_system_of(tmp_path) is not None
    assert place.file_system_of(place.Path("/proc/self")) == "proc"
    network = ("nfs4", "cifs", "lustre", "gpfs", "fuse.sshfs", "fuse.gcsfuse", "9p")
    assert all(map(place.is_network, network))
    local = ("ext4", "xfs", "btrfs", "overlay", "tmpfs", "fuseblk", "fuse.fuse-overlayfs", None)
    assert not any(map(place.is_network, local))


def test_a_run_folder_on_a_network_has_its_record_in_a_private_folder_of_the_user(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    kinds = {folder: "nfs4"}
    monkeypatch.setattr(place, "file_system_of", lambda path: kinds.get(path, "ext4"))
    file = place.prepare_record(folder, "run")
    assert file.parent.parent == tmp_path / "tmp" / f"slime-{os.getuid()}"
    assert file.parent.parent.stat().st_mode & 0o077 == 0
    shutil.rmtree(file.parent.parent)
    (tmp_path / "tmp" / f"slime-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(
        RecordError, match="belongs to another user: give a folder on a local disk: --record-dir"
    ):
        place.prepare_record(folder, "run")
    kinds[tmp_path / "tmp"] = "nfs4"
    assert place.prepare_record(folder, "run") == folder / "record.db"
    assert f"{folder} is on a network file system (nfs4), where a record may be damaged" in caplog.text


def test_the_same_host_continues_from_its_own_record_and_the_end_leaves_one_in_the_run_folder(
    folder, tmp_path
):
    first = killed_after_a_checkpoint(folder, tmp_path / "disk")
    assert steps_in(folder / "record.db") == [0, 1] and place.describe_copy(folder) is None
    assert steps_in(record_file(folder)) == [0, 1, 2]
    again = start(folder, tmp_path / "another-disk", 2)
    assert again._file == first._file
    again.close()
    assert steps_in(folder / "record.db") == [0, 1, 2] and record_file(folder) == folder / "record.db"
    assert not first._file.exists() and not (folder / "record.json").exists()


def test_another_host_continues_from_the_copy_and_its_record_outdates_the_first_one(folder, tmp_path):
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    first = killed_after_a_checkpoint(folder, disks[0])
    disks[0].rename(tmp_path / "away")  # another host does not see it
    second = start(folder, disks[1], 2)
    assert steps_in(second._file) == [0, 1]
    steps = Steps(folder, second)
    steps.step(2, [group_of(3)])
    second.flush()
    disks[1].rename(tmp_path / "away-too")  # it was killed, too, before a checkpoint
    (tmp_path / "away").rename(disks[0])
    third = start(folder, disks[0], 3)  # the first host again
    assert steps_in(third._file) == [0, 1] and third._file != first._file
    assert not first._file.exists()
    third.close()


def test_commands_on_another_host_read_the_copy_and_report_its_age(folder, tmp_path, capsys):
    local = tmp_path / "disk"
    start(folder, local)
    os.rename(local, tmp_path / "away")
    assert "; its first copy is made at the first checkpoint" in place.describe_copy(folder)
    os.rename(tmp_path / "away", local)
    killed_after_a_checkpoint(folder, local)
    assert samples_command.main([str(folder), "--json"]) == 0
    seen = capsys.readouterr()
    assert len(seen.out.splitlines()) == 6 and "as of step" not in seen.err
    os.rename(local, tmp_path / "away")
    about = f"the record is on {place.socket.gethostname()}; its copy here is as of step 2, copied at 2"
    assert samples_command.main([str(folder), "--json"]) == 0
    seen = capsys.readouterr()
    assert len(seen.out.splitlines()) == 4 and about in seen.err
    assert ledger_command.main(["audit", str(folder)]) == 0
    seen = capsys.readouterr()
    assert "steps trained: 0 to 1" in seen.out and "VIOLATION" not in seen.out and about in seen.err
    assert status_command.status_main([str(folder)]) == 0
    assert about in capsys.readouterr().out
    run = RunFolder(folder, "run")
    assert run.record_facts()["rollouts"] == 2
    assert about in next(entry["text"] for entry in trouble_of(run) if entry["severity"] == "note")
    assert [row.state for row in read_actions(folder, None)] == []


def test_another_host_asks_and_gets_the_reply_before_there_is_a_new_copy(folder, tmp_path, capsys):
    """Its requests and their replies are files in the shared folder; the next copy replaces them."""
    local = tmp_path / "disk"
    recording = start(folder, local)
    content = (folder / "record.json").read_text()
    (folder / "record.json").write_text(json.dumps({**json.loads(content), "folder": "elsewhere"}))
    assert place.written_elsewhere(folder) is not None  # as another host sees it
    number = ask(folder, "pause", None, "test")
    [row] = recording.actions(ASKED)
    assert row.id == number
    recording.reply(row, DONE, 3, "paused")
    recording.flush()
    assert recording.actions(ASKED) == []
    [seen] = ask_command._rows(folder)
    assert (seen.id, seen.state, seen.reply) == (number, DONE, "paused")
    (folder / "record.json").write_text(content)
    assert recording.copy() and list((folder / "requests").iterdir()) == []
    [seen] = ask_command._rows(folder)
    assert (seen.id, seen.state, seen.reply) == (number, DONE, "paused")
    recording.close()


def test_the_dashboard_shows_each_new_copy(folder, tmp_path):
    local = tmp_path / "disk"
    recording = killed_after_a_checkpoint(folder, local)
    content = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**content, "folder": "elsewhere"}))
    run = RunFolder(folder, "run")
    assert run.record_facts()["rollouts"] == 2
    assert recording.copy()
    assert run.record_facts()["rollouts"] == 3


def test_a_record_that_an_older_version_wrote_on_the_network_is_continued(folder, tmp_path):
    """In WAL mode, and killed: its last rows are only in the write-ahead log."""
    old = RecordWriter(folder / "record.db", "run", 64 * MIB)
    old.add("train", 0, [])
    old.flush()
    stop = tmp_path / "stop"
    shutil.copytree(folder, stop)
    old.close()
    assert (stop / "record.db-wal").stat().st_size
    recording = start(stop, tmp_path / "disk", 2)
    assert steps_in(recording._file) == [0]
    assert recording.copy()
    assert not list(stop.glob("record.db-*")) and steps_in(stop / "record.db") == [0]
    recording.close()


def test_a_folder_that_moved_to_a_local_disk_takes_the_record_back(folder, tmp_path):
    first = killed_after_a_checkpoint(folder, tmp_path / "disk")
    again = Recording(Run("run", folder, "shm", 2), parse(run_dir=str(folder)))
    assert steps_in(folder / "record.db") == [0, 1, 2] and not first._file.exists()
    again.close()


def test_a_copy_that_cannot_be_written_is_a_warning_and_the_one_before_stays(
    folder, tmp_path, caplog, monkeypatch
):
    recording = killed_after_a_checkpoint(folder, tmp_path / "disk")

    def full_disk(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    recording.close()
    assert f"to {folder} ([Errno 28] No space left on device" in caplog.text
    assert steps_in(folder / "record.db") == [0, 1] and steps_in(record_file(folder)) == [0, 1, 2]
    assert sorted(path.name for path in folder.glob("record*")) == ["record.db", "record.json"]


def test_the_record_of_another_run_is_refused_before_anything_is_written(folder, tmp_path):
    RecordWriter(folder / "record.db", "another", 64 * MIB).close()
    with contextlib.closing(sqlite3.connect(folder / "record.db")) as connection, connection:
        connection.execute(
            "INSERT INTO rollouts (kind, rollout_id, time, num_groups, num_samples)"
            " VALUES ('train', 0, 0, 0, 0)"
        )
    with pytest.raises(RecordError, match="is the record of run another"):
        start(folder, tmp_path / "disk")
    assert not (folder / "record.json").exists() and not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize("given", ["/proc/records", "a-file"])
def test_a_local_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    with pytest.raises(RecordError, match=f"--record-dir '{given}' cannot be written .*: give a folder"):
        place.prepare_record(tmp_path, "run", given)
