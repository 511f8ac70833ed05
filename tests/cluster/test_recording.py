"""What a run tells its record: an action is answered, and is open no more from then on."""

from argument_helpers import parse
from patience import PATIENCE_S

from slime.cluster.recording import Recording
from slime.record import writer
from slime.record.actions import ASKED, DONE, ask
from slime.utils.machine.run_identity import Run


def recording_of(folder):
    recording = Recording(Run("run", folder, "shm", 1), parse(run_dir=str(folder)))
    recording.flush()
    return recording


def write_late(recording, monkeypatch):
    """What is told from now on waits until it is asked for."""
    monkeypatch.setattr(writer, "GATHER_S", 10 * PATIENCE_S)
    recording.now("training", 0.0, 0)


def test_an_action_is_open_until_it_is_answered_not_until_the_answer_is_written(tmp_path, monkeypatch):
    recording = recording_of(tmp_path)
    first, second = ask(tmp_path, "lr", 5e-4, "test"), ask(tmp_path, "clip", 0.3, "test")
    write_late(recording, monkeypatch)
    assert [row.id for row in recording.actions(ASKED)] == [first, second]
    recording.reply(recording.actions(ASKED)[0], DONE, 0, "done")
    assert [row.id for row in recording.actions(ASKED)] == [second]
    recording.flush()
    assert [row.id for row in recording.actions(DONE)] == [first]
    assert [row.id for row in recording.actions(ASKED)] == [second]
    recording.close()


def test_what_an_earlier_start_left_open_is_no_action_of_this_one(tmp_path, monkeypatch):
    recording_of(tmp_path).close()
    ask(tmp_path, "stop", None, "test")
    recording = recording_of(tmp_path)
    write_late(recording, monkeypatch)
    recording.begin(0)
    assert recording.actions(ASKED) == []
    recording.close()
