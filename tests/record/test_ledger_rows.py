"""The ledger: what is finished is given back after a crash, and conservation is proven or refuted."""

import contextlib
import copy
import json
import math
import re
import sqlite3
import threading

import numpy as np
import pytest
import torch
from ledger_world import MIB, World, finish, full_disk, group_of
from patience import PATIENCE_S

from slime.record import LedgerReader, RecordError, RecordWriter, group_entries, writer
from slime.record.audit import audit
from slime.record.texts import json_text
from slime.rollout.data_source import follow
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import copy_group, next_attempt
from slime.utils.types import RewardFailure, Sample


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


@pytest.mark.parametrize("traced", [(), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("attached", [(), (1,), (0, 1, 2, 3)])
def test_samples_of_a_group_come_back_each_with_what_is_its_own(world, attached, traced):
    ledger = world.start()
    ledger.begin(0, "run:1")
    group = group_of(0, copies=4)
    ledger.issued([group], from_buffer=False)
    made = [finish(sample, reward=reward) for sample, reward in zip(group, (0.0, -0.0, 1, 0.3), strict=True)]
    for place in attached:
        made[place].notes = f"attached later, to {place}"
    for place in traced:
        made[place].trace = {"events": []}  # is in most, and is not kept
    made[2].non_generation_time, made[2].remove_sample, made[2].loss_mask = 0.5, True, [1, 0]
    made[3].version_spans, made[3].turn_rewards = [("run:1", 0, 1), ("run:2", 1, 2)], [(0, 2, 0.5)]
    for before, after in zip(group, made, strict=True):
        ledger.finished(before, after)
    ledger = world.start(any_version=True)
    ledger.begin(0, "run:1")
    found = [ledger.recall(sample) for sample in group]
    for place in traced:
        del made[place].trace
    assert [vars(sample) for sample in found] == [vars(sample) for sample in made]
    assert [str(sample.reward) for sample in found] == ["0.0", "-0.0", "1", "0.3"]


@pytest.mark.parametrize("reward", [0.5, {"score": 0.5}])
@pytest.mark.parametrize("alike", [False, True])
def test_what_is_kept_of_a_sample_is_as_it_was_when_it_was_finished(world, alike, reward):
    ledger = world.start()
    ledger.begin(0, "run:1")
    group = group_of(0)
    made = [finish(sample, reward=copy.copy(reward)) for sample in group]
    if not alike:
        made[0].status = Sample.Status.TRUNCATED
    before = [Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) for sample in made]
    world.writer._write_notes = hold = Held(world.writer._write_notes)
    for origin, sample in zip(group, made, strict=True):
        ledger.finished(origin, sample)
    ledger.begin(1, "run:2")  # as a pool's samples of weights before
    for sample in made:  # as filters and the buffer do it
        if isinstance(sample.reward, dict):
            sample.reward["score"] = 7.0
        sample.reward, sample.reward_failure = None, RewardFailure("invalid", "of another")
        sample.metadata["start_rollout_id"], sample.loss_mask = 3, [0, 0]
        sample.tokens, sample.status, sample.remove_sample = [], Sample.Status.PENDING, True
        sample.rollout_log_probs[0], sample.version_spans = 9.0, []
    hold.go_on.set()
    ledger = world.start()
    ledger.begin(0, "run:1")
    assert [ledger.recall(sample) for sample in group] == before


class Held:
    """A call that waits until it is let go on."""

    def __init__(self, call):
        self.call, self.go_on = call, threading.Event()

    def __call__(self, *what):
        self.go_on.wait()
        return self.call(*what)


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
    assert ledger.recall(next_attempt(copy_group([sample]))[0]) is None
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
    ledger.account_for(0, [finish(s) for group in (groups[0], group_of(70)) for s in group])
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
    while world.writer._missed["missed_events"] == 0 and world.writer._thread.is_alive():
        pass
    ledger.issued([group_of(1)], from_buffer=False)
    assert "could not be written" in "\n".join(world.audit().violations)
    told = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(told) == 1 and "after a crash more is generated again" in told[0]


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


def test_size_never_removes_what_no_checkpoint_covers(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run", MIB // 2, keeps_uncommitted=True)
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


def test_the_samples_of_a_batch_that_is_complete_soon_are_not_stored(world, monkeypatch):
    monkeypatch.setattr(writer, "GATHER_S", 10 * PATIENCE_S)
    ledger = world.start()
    world.make(0, [group_of(0)])
    ledger.begin(1, "run:1")
    for sample in group_of(1):
        ledger.finished(sample, finish(sample))
    world.writer.flush()
    with LedgerReader(world.path) as reader:
        assert [key[0] for key in reader.finished_entries("s")] == [2, 3]


@pytest.mark.parametrize(
    "rewards",
    [
        (0.0, -0.0, 1.0),
        (1e-7, 1e300, 0.1 + 0.2),
        (0.5, math.nan, -math.inf),
        (1, True, None),
        ({"a": 1.0}, "x"),
    ],
)
def test_rewards_are_written_as_json(rewards):
    by_index = {68 + place: reward for place, reward in enumerate(rewards)}
    assert json_text(by_index) == json.dumps(by_index)


def test_what_several_threads_tell_at_once_is_all_written_and_in_their_order(world):
    ledger = world.start()

    def tell(first):
        for number in range(200):
            ledger.returned([group_of(first + number)])

    threads = [threading.Thread(target=tell, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.writer.flush()
    with LedgerReader(world.path) as reader:
        found = [row.group_index for row in reader.events() if row.event == "returned"]
    assert sorted(found) == [first + number for first in range(0, 4000, 1000) for number in range(200)]
    for first in range(0, 4000, 1000):
        of_one = [index for index in found if first <= index < first + 1000]
        assert of_one == sorted(of_one)
