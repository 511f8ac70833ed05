"""The ledger: what is finished is given back after a crash, and conservation is proven or refuted."""

import contextlib
import json
import re
import sqlite3

import numpy as np
import pytest
import torch
from patience import PATIENCE_S, eventually

from slime.cli.inspect import ledger as command
from slime.cli.inspect import replay
from slime.record import LedgerReader, RecordError, RecordWriter, group_entries, ledger_rows, open_record
from slime.record.audit import audit
from slime.rollout.dumps import load_rollout_dump
from slime.rollout.ledger import Ledger, follow
from slime.rollout.prompt_groups import begin_again, copy_group
from slime.utils.files.run_file import open_run_file
from slime.utils.types import RewardFailure, Sample

MIB = 1 << 20


def group_of(index, copies=2, **more):
    return [Sample(group_index=index, index=index * copies + i, prompt="2+2=", **more) for i in range(copies)]


def finish(sample, version=1, reward=1.0):
    done = Sample.from_dict(sample.to_dict())
    done.tokens, done.response_length, done.rollout_log_probs = [5, 6, 7], 2, [-0.1, -0.25]
    done.version_spans, done.reward, done.status = [(f"run:{version}", 0, 2)], reward, Sample.Status.COMPLETED
    return done


class World:
    """A run folder whose process can be started again; `step` plays one step of a run."""

    def __init__(self, folder):
        self.path, self.starts, self.writer = folder / "record.db", 0, None

    def start(self, committed=-1, last_made=-1, settings="s", **options):
        self.stop()
        self.starts += 1
        known = {}
        if self.starts > 1:
            with LedgerReader(self.path) as reader:
                known = reader.finished_entries(settings)
        self.writer = RecordWriter(self.path, "run", 64 * MIB, start=self.starts)
        self.ledger = Ledger(self.writer, settings, known=known, **options)
        self.ledger.resumed(committed, last_made)
        return self.ledger

    def stop(self):
        if self.writer is not None:
            self.writer.close()

    def make(self, rollout_id, groups, source="new"):
        ledger = self.ledger
        ledger.begin(rollout_id, f"run:{rollout_id + 1}")
        ledger.issued(groups, from_buffer=source == "buffer")
        made = [[finish(s, rollout_id + 1) for s in group] for group in groups]
        for group, done in zip(groups, made, strict=True):
            for before, after in zip(group, done, strict=True):
                ledger.finished(before, after)
        ledger.consumed(made, "trained")
        self.writer.add("train", rollout_id, group_entries(made, "trained"))
        ledger.cut(rollout_id)
        ledger.made(rollout_id, {"cursor": {"at": rollout_id}, "batch": {"tokens": [1, 2]}})

    def step(self, rollout_id, groups, commit=False):
        self.make(rollout_id, groups)
        self.ledger.trained(rollout_id)
        if commit:
            self.ledger.committed(rollout_id)

    def audit(self, finished=True):
        self.stop()
        return audit(self.path, finished=finished)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.stop()


def test_an_undisturbed_run_is_conserved(world):
    world.start()
    for step in range(3):
        world.step(step, [group_of(2 * step), group_of(2 * step + 1)], commit=step == 1)
    found = world.audit()
    assert found.violations == [] and found.steps == [0, 1, 2] and found.num_samples == 12
    assert found.committed == 1 and found.groups == {"kept": 6}


def test_an_audit_as_json_is_json(world, capsys):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.stop()
    assert command.main(["audit", str(world.path.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"kept": 1} and found["violations"] == [] and found["num_samples"] == 2


def test_finished_samples_of_an_unfinished_rollout_come_back_with_every_number(world):
    ledger = world.start()
    ledger.begin(0, "run:1")
    first, second = group_of(0)
    ledger.issued([[first, second]], from_buffer=False)
    done = finish(first, reward={"score": 0.5})
    done.metadata["note"] = {"nested": [1.5, None]}
    ledger.finished(first, done)
    ledger = world.start()
    ledger.begin(0, "run.2:1")  # the same weights under another start's name
    assert ledger.recall(first) == done
    assert ledger.recall(second) is None, "it was not finished"
    assert ledger.recall(first) is None, "once"


@pytest.mark.parametrize("attached", [(), (1,), (0, 1, 2, 3)])  # together they are packed by columns
def test_samples_of_a_group_come_back_each_with_what_is_its_own(world, attached):
    ledger = world.start()
    ledger.begin(0, "run:1")
    group = group_of(0, copies=4)
    ledger.issued([group], from_buffer=False)
    made = [finish(sample, reward=reward) for sample, reward in zip(group, (0.0, -0.0, 1, 0.3), strict=True)]
    for place in attached:
        made[place].notes = f"attached later, to {place}"
    made[2].non_generation_time, made[2].remove_sample, made[2].loss_mask = 0.5, True, [1, 0]
    made[3].version_spans, made[3].turn_rewards = [("run:1", 0, 1), ("run:2", 1, 2)], [(0, 2, 0.5)]
    for before, after in zip(group, made, strict=True):
        ledger.finished(before, after)
    ledger = world.start(any_version=True)
    ledger.begin(0, "run:1")
    found = [ledger.recall(sample) for sample in group]
    assert [vars(sample) for sample in found] == [vars(sample) for sample in made]
    assert [str(sample.reward) for sample in found] == ["0.0", "-0.0", "1", "0.3"]


def test_numbers_in_arrays_as_plug_ins_may_make_them_come_back(world):
    ledger = world.start()
    ledger.begin(0, "run:1")
    group = group_of(0)
    ledger.issued([group], from_buffer=False)
    made = [finish(sample) for sample in group]
    made[0].rollout_log_probs, made[0].loss_mask = np.array([-0.5, -0.25]), np.array([1, 0])
    made[1].rollout_log_probs, made[1].loss_mask = torch.tensor([-1.5, -0.5]), np.array([1, 1])
    for before, after in zip(group, made, strict=True):
        ledger.finished(before, after)
    ledger = world.start()
    ledger.begin(0, "run:1")
    found = [ledger.recall(sample) for sample in group]
    assert [list(map(float, sample.rollout_log_probs)) for sample in found] == [[-0.5, -0.25], [-1.5, -0.5]]
    assert [list(sample.loss_mask) for sample in found] == [[1, 0], [1, 1]]


def test_samples_of_other_weights_attempts_or_settings_are_generated_again(world):
    ledger = world.start()
    ledger.begin(0, "run:1")
    sample = group_of(0)[0]
    ledger.finished(sample, finish(sample))
    ledger = world.start()
    ledger.begin(1, "run:2")
    assert ledger.recall(sample) is None, "newer weights would have made other tokens"
    ledger.begin(0, "run:1")
    assert ledger.recall(begin_again(copy_group([sample]))[0]) is None
    assert world.start(settings="other").recall(sample) is None
    ledger = world.start(any_version=True)
    ledger.begin(1, "run:2")
    assert ledger.recall(sample) is not None, "the pool judges its age itself"


def test_a_reward_that_failed_is_not_kept_and_a_fan_out_comes_back_as_one(world):
    ledger = world.start()
    ledger.begin(0, "run:1")
    first, second = group_of(0)
    unscored = finish(first, reward=None)
    unscored.reward_failure = RewardFailure("infra", "down")
    ledger.finished(first, unscored)
    ledger.finished(second, [finish(second), finish(second)])
    ledger = world.start()
    ledger.begin(0, "run:1")
    assert ledger.recall(first) is None
    assert len(ledger.recall(second)) == 2


def test_complete_rollouts_follow_a_checkpoint_without_a_gap(world):
    world.start()
    for step in range(4):
        world.step(step, [group_of(step)], commit=step == 0)
    world.stop()
    with LedgerReader(world.path) as reader:
        assert list(reader.rollouts_after(0, "s")) == [1, 2, 3]
        assert reader.rollouts_after(0, "s")[2]["cursor"] == {"at": 2}
        assert reader.rollouts_after(0, "changed") == {}
        assert reader.finished_entries("s") == {}, "they are part of rollouts now"
    with sqlite3.connect(world.path) as connection:
        connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id = 2")
    connection.close()
    with LedgerReader(world.path) as reader:
        assert list(reader.rollouts_after(0, "s")) == [1]


def test_rollouts_stay_whole_until_the_checkpoint_after_the_next_covers_them(world):
    world.start()
    for step in range(3):
        world.step(step, [group_of(step)], commit=True)
    world.stop()
    with LedgerReader(world.path) as reader:
        assert list(reader.rollouts_after(1, "s")) == [2], "the newest checkpoint may be damaged"
        assert reader.rollouts_after(-1, "s") == {}


def test_a_lost_step_is_taken_again_and_counts_once(world):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.step(1, [group_of(1)])
    world.start(committed=0, last_made=1)  # killed after step 1, before its checkpoint
    world.ledger.trained(1)
    world.step(2, [group_of(2)], commit=True)
    found = world.audit()
    assert found.violations == [] and found.steps == [0, 1, 2] and found.redone == 1


def test_what_happened_after_the_point_of_resumption_counts_no_more(world):
    world.start()
    world.step(0, [group_of(0)], commit=True)
    world.ledger.begin(1, "run:2")
    world.ledger.issued([group_of(1), group_of(2)], from_buffer=False)
    world.ledger.consumed([group_of(1)], "filtered", "zero_std")
    world.start(committed=0, last_made=0)
    world.step(1, [group_of(1)], commit=True)
    found = world.audit()
    assert found.violations == [] and found.groups == {"kept": 2}


def test_groups_in_flight_at_a_cut_are_in_the_buffer_of_its_cursor(world):
    world.start()
    world.ledger.issued([group_of(5 - 5), group_of(1)], from_buffer=False)
    world.ledger.consumed([group_of(0)], "trained")
    world.writer.add("train", 0, group_entries([group_of(0)], "trained"))
    world.ledger.cut(0)
    world.ledger.trained(0)
    world.ledger.committed(0)
    world.start(committed=0, last_made=0)
    world.make(1, [group_of(1)], source="buffer")
    world.ledger.trained(1)
    assert world.audit().violations == []


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda w: w.ledger.trained(0), "step 0 was trained twice"),
        (lambda w: w.step(1, [group_of(0)]), "group 0 was handed out twice"),
        (lambda w: w.step(1, [group_of(3)]), r"groups \[1, 2\] were never handed out"),
        (lambda w: w.ledger.issued([group_of(1)], from_buffer=False), r"groups \[1\] are lost"),
        (lambda w: w.ledger.trained(1), "step 1 was trained, and no group was kept for it"),
        (lambda w: w.ledger.committed(1), "the checkpoint after step 1 misses step 1"),
        (lambda w: w.ledger.consumed([group_of(9)], "trained"), "group 9 was kept .* and was unknown"),
        (lambda w: w.writer.add("train", 0, group_entries([group_of(7)], "trained")), "not in both"),
    ],
)
def test_each_violation_is_named(world, break_it, told):
    world.start()
    world.step(0, [group_of(0)])
    break_it(world)
    found = world.audit()
    assert re.search(told, "\n".join(found.violations)), found.violations


def test_the_digest_tells_runs_apart_by_a_single_token(tmp_path):
    digests = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        world = World(tmp_path / name)
        world.start()
        world.step(0, [group_of(0)])
        if name == "c":
            other = [finish(s, 1) for s in group_of(0)]
            other[0].tokens[-1] += 1
            world.writer.add("train", 0, group_entries([other], "trained"))
        digests.append(world.audit().digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_source_of_a_users_own_reports_by_the_calls_it_gets(world):
    class Own:
        def get_samples(self, num_samples):
            return [group_of(i) for i in range(num_samples)]

        def add_samples(self, samples):
            pass

    ledger = world.start()
    source = Own()
    follow(source, ledger)
    groups = source.get_samples(2)
    source.add_samples(groups[1:])
    ledger.account_for(0, [[finish(s) for s in groups[0]], [finish(s) for s in group_of(70)]])
    world.writer.add("train", 0, group_entries([groups[0], group_of(70)], "trained"))
    ledger.cut(0)
    ledger.trained(0)
    found = world.audit()
    assert found.violations == [] and found.groups == {"kept": 2, "buffer": 1}


def test_a_full_disk_is_told_once_and_the_audit_says_that_nothing_can_be_proven(world, caplog):
    ledger = world.start()
    world.writer._hand_over = lambda item: None  # only events
    original, failures = world.writer._write_notes, iter([True])

    def full(notes):
        if next(failures, False):
            raise sqlite3.OperationalError("database or disk is full")
        original(notes)

    world.writer._write_notes = full
    ledger.issued([group_of(0)], from_buffer=False)
    while world.writer._missed.events == 0 and world.writer._thread.is_alive():
        pass
    ledger.issued([group_of(1)], from_buffer=False)
    assert "could not be written" in "\n".join(world.audit().violations)
    told = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(told) == 1 and "after a crash more is made again" in told[0]


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
    assert "start 2 went on from the checkpoint after step 2" in found.violations[1]
    assert "does not say that steps [2] were trained" in found.violations[1]
    assert command.main(["audit", str(world.path.parent)]) == 1
    assert "the samples of steps [1, 2] are not in the record" in capsys.readouterr().out


def test_events_are_written_once_where_old_samples_cannot_be_removed(world):
    world.start()
    world.writer._prune = full_disk
    world.step(0, [group_of(0)], commit=True)
    found = world.audit()
    assert found.violations == [] and found.groups == {"kept": 1}
    with LedgerReader(world.path) as reader:
        assert [row.event for row in reader.events()].count("kept") == 1


def test_samples_that_are_missing_without_a_note_are_a_violation(world):
    world.start()
    for step in range(2):
        world.step(step, [group_of(step)], commit=True)
    world.writer.close()
    with contextlib.closing(sqlite3.connect(world.path)) as connection, connection:
        connection.execute("DELETE FROM rollouts WHERE rollout_id = 1")
    found = audit(world.path, finished=True)
    assert found.unrecorded == [] and len(found.violations) == 1
    assert "step 1 was trained, but its samples are not in the record, nor a note" in found.violations[0]


def test_what_could_not_be_written_is_counted_over_all_starts(world):
    for start in range(2):
        world.start(committed=start - 1, last_made=start - 1)
        world.writer._write = full_disk
        world.step(start, [group_of(start)], commit=True)
        world.writer.close()
    found = world.audit()
    assert found.violations == [] and found.unrecorded == [0, 1]
    with LedgerReader(world.path) as reader:
        assert reader.meta("missed_rollouts") == "2"


def full_disk(*what):
    raise sqlite3.OperationalError("database or disk is full")


def test_size_and_age_never_remove_what_no_checkpoint_covers(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run", MIB, max_days=1e-9, keeps_uncommitted=True)
    ledger = Ledger(writer, "s")
    ledger.resumed(-1, -1)
    for step in range(4):
        long = [Sample(**{**vars(finish(s)), "response": "x" * MIB}) for s in group_of(step)]
        writer.add("train", step, group_entries([long], "trained"))
        if step == 1:
            ledger.committed(1)
    writer.close()
    with sqlite3.connect(tmp_path / "record.db") as connection:
        pruned = dict(connection.execute("SELECT rollout_id, pruned FROM rollouts"))
    connection.close()
    assert pruned == {0: 1, 1: 1, 2: 0, 3: 0}


def test_a_clock_that_goes_backwards_changes_no_order(world, monkeypatch):
    times = iter(range(10_000, 0, -1))
    monkeypatch.setattr("slime.rollout.ledger.time.time", lambda: float(next(times)))
    world.start()
    for step in range(3):
        world.step(step, [group_of(step)], commit=True)
    assert world.audit().violations == []


def test_the_command_says_what_it_found_and_ends_accordingly(world, capsys, tmp_path):
    world.start()
    world.step(0, [group_of(0)])
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "conserved: every group has one fate" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "1"]) == 0
    assert "tokens    [5, 6, 7]" in capsys.readouterr().out
    assert command.main(["show", str(tmp_path), "--step", "0", "--sample", "9"]) == 2
    assert "step 0 has no sample 9; it has 0 to 1." in capsys.readouterr().err
    for step in ("4", "-1", str(1 << 70), str(-(1 << 70))):
        assert command.main(["show", str(tmp_path), "--step", step]) == 2
        assert f"there is no step {step}; it has 0 to 0." in capsys.readouterr().err
    assert command.main(["audit", str(world.path)]) == 2
    assert "record.db is a file; give the folder of a run." in capsys.readouterr().err
    world.start()
    world.ledger.trained(0)
    world.ledger.trained(0)
    world.stop()
    assert command.main(["audit", str(tmp_path)]) == 1
    assert "VIOLATION: step 0 was trained twice" in capsys.readouterr().out
    assert command.main(["audit", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("words", [["audit"], ["show", "--step", "0"], ["replay", "--step", "0"]])
def test_a_folder_that_holds_runs_is_told_with_their_names(tmp_path, capsys, words):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert command.main([*words, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"In it are the runs {tmp_path / 'one'}, {tmp_path / 'two'}." in told


def test_a_replay_offers_steps_that_were_made_and_whose_weights_are_there(world, tmp_path, capsys):
    run = open_run_file(tmp_path, {}, str(tmp_path / "ckpt"), None, None)
    assert run.num_starts == 1
    world.start()
    for step in range(3):
        world.step(step, [group_of(step)])
    world.stop()
    for step in (1, 2):
        (tmp_path / "ckpt" / f"step_{step:07d}").mkdir(parents=True)
    assert command.main(["replay", str(tmp_path), "--step", "3"]) == 2
    assert "there is no step 3; it has 0 to 2." in capsys.readouterr().err
    assert command.main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "Steps that can be replayed: [0, 2] (" in capsys.readouterr().err


def test_a_replay_gets_pairs_and_siblings_as_they_were(world, tmp_path):
    world.start()
    world.make(0, [group_of(0, rollout_id=6), group_of(1)])
    world.stop()
    with open_record(tmp_path) as record:
        replay._write_dump(record, 0, str(tmp_path / "{rollout_id}.pt"))
    found = load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0)
    assert [(s.group_index, s.rollout_id) for s in found] == [(0, 6), (0, 6), (1, None), (1, None)]
    assert found[0].tokens == [5, 6, 7] and found[0].rollout_log_probs == pytest.approx([-0.1, -0.25])


def test_a_run_that_was_killed_before_its_first_event_has_lost_nothing(tmp_path, capsys):
    RecordWriter(tmp_path / "record.db", "run", MIB).close()
    assert command.main(["audit", str(tmp_path)]) == 0
    assert "the ledger is empty: no rollout was made yet" in capsys.readouterr().out
    assert audit(tmp_path / "record.db", finished=True).violations


def test_a_record_that_holds_nothing_is_taken_over_and_one_with_samples_is_not(tmp_path):
    RecordWriter(tmp_path / "record.db", "killed-before-its-first-rollout", MIB).close()
    writer = RecordWriter(tmp_path / "record.db", "run", MIB)
    writer.add("train", 0, group_entries([group_of(0)], "trained"))
    writer.close()
    with pytest.raises(RecordError, match="is the record of run run, this is run other"):
        RecordWriter(tmp_path / "record.db", "other", MIB)


def test_a_flush_returns_when_every_event_until_then_can_be_read(world):
    ledger = world.start()
    for rollout_id in range(5):
        world.make(rollout_id, [group_of(rollout_id)])
        ledger.trained(rollout_id)
        world.writer.flush()
        with LedgerReader(world.path) as reader:
            assert [row.rollout for row in reader.events() if row.event == "consumed"][-1] == rollout_id
    world.stop()
    world.writer.flush()  # of a writer that is closed: nothing is waited for


def test_a_complete_batch_is_written_at_once_and_its_samples_are_not_packed(world, monkeypatch):
    packed = []
    monkeypatch.setattr(ledger_rows, "_kept_rows", lambda notes: packed.append(notes) or [])
    world.start()
    world.writer.flush()
    world.writer._gather_s = 10 * PATIENCE_S
    world.make(0, [group_of(0)])

    def is_made():
        with LedgerReader(world.path) as reader:
            return any(row.event == "made" for row in reader.events())

    eventually(is_made)
    assert packed == []
