"""The record of a run: what is written is read back, the file stays within its size, errors are clear."""

import contextlib
import sqlite3
import threading

import pytest
from patience import LONG_S, eventually

from slime.record import RecordError, RecordWriter, Select, group_entries, open_record
from slime.utils.files.run_file import open_run_file
from slime.utils.types import RewardFailure, Sample

MIB = 1 << 20


def make_sample(group, copy=0, reward=1.0, response="4", prompt="2+2=", **more):
    return Sample(
        group_index=group,
        index=group * 10 + copy,
        prompt=prompt,
        tokens=[5, 6, 7, 70_000],
        response=response,
        response_length=2,
        label="4",
        reward=reward,
        rollout_log_probs=[-0.5, -0.25],
        version_spans=[("run:1", 0, 2)],
        status=Sample.Status.COMPLETED,
        **more,
    )


@pytest.fixture
def writer(tmp_path):
    made = RecordWriter(tmp_path / "record.db", "run-1", 64 * MIB)
    yield made
    made.close()


def record_of(writer):
    writer.close()
    return open_record(writer._path.parent)


def test_samples_come_back_with_their_tokens_outcome_and_reward(writer):
    kept = [[make_sample(0), make_sample(0, 1, reward=0.0, response="5", loss_mask=[1, 0])]]
    entries = group_entries(kept, "trained") + group_entries([[make_sample(1)]], "filtered", "zero_std_1.0")
    writer.add("train", 3, entries, version="run:1")
    with record_of(writer) as record:
        [row] = record.rollouts()
        assert (row.kind, row.rollout_id, row.num_groups, row.num_samples) == ("train", 3, 2, 3)
        assert row.mean_reward == pytest.approx(2 / 3) and not row.pruned
        answers = record.samples(Select())
        assert [(a.outcome, a.reason, a.response, a.reward) for a in answers] == [
            ("trained", None, "4", 1.0),
            ("trained", None, "5", 0.0),
            ("filtered", "zero_std_1.0", "4", 1.0),
        ]
        tokens = record.tokens(answers[1].row)
        assert tokens.ids == [5, 6, 7, 70_000] and tokens.log_probs == [-0.5, -0.25]
        assert tokens.loss_mask == [1, 0] and tokens.versions == [("run:1", 0, 2)]
        assert record.tokens(answers[0].row).loss_mask is None


def test_answers_are_found_by_reward_text_and_outcome(writer):
    samples = [make_sample(n, reward=n / 10, response=f"Answer {n}", prompt=f"p{n}") for n in range(10)]
    writer.add("train", 0, group_entries([[s] for s in samples], "trained"))
    failed = make_sample(99, reward=None, reward_failure=RewardFailure("infra", "judge down"))
    writer.add("train", 1, group_entries([[failed]], "failed", "judge down"))
    with record_of(writer) as record:
        assert [a.response for a in record.samples(Select(order="worst", limit=2))] == [
            "Answer 0",
            "Answer 1",
        ]
        assert [a.reward for a in record.samples(Select(order="best", limit=1))] == [0.9]
        assert [a.prompt for a in record.samples(Select(contains="ANSWER 7"))] == ["p7"]
        assert record.samples(Select(contains="100% sure_")) == []
        [answer] = record.samples(Select(outcome="failed"))
        assert answer.failure == "infra: judge down" and answer.reward is None
        assert len(record.samples(Select(rollout_id=0, limit=100))) == 10


def test_the_same_prompt_early_and_late(writer):
    for rollout_id, response in ((1, "five"), (9, "four")):
        writer.add(
            "eval",
            rollout_id,
            group_entries([[make_sample(0, response=response)]], "evaluated", dataset="held"),
        )
        writer.add(
            "train", rollout_id, group_entries([[make_sample(1, prompt=f"only {rollout_id}")]], "trained")
        )
    with record_of(writer) as record:
        assert record.prompts_of_both("eval", 1, 9, 10) == ["2+2="]
        assert record.prompts_of_both("train", 1, 9, 10) == []
        assert [a.response for a in record.samples_of_prompt("eval", 9, "2+2=")] == ["four"]


def test_a_rollout_that_is_made_again_takes_the_place_of_the_first(writer):
    writer.add("train", 4, group_entries([[make_sample(0, response="lost")]], "trained"))
    writer.add("train", 4, group_entries([[make_sample(0, response="redone")]], "trained"))
    with record_of(writer) as record:
        assert [a.response for a in record.samples(Select())] == ["redone"]


def test_rewards_with_parts_keep_them(writer):
    sample = make_sample(0, reward={"score": 0.5, "format": 1, "note": "ok"})
    writer.add("train", 0, group_entries([[sample]], "trained"), reward_key="score")
    with record_of(writer) as record:
        [answer] = record.samples(Select())
    assert answer.reward == 0.5 and answer.reward_parts == {"score": 0.5, "format": 1, "note": "ok"}


HOSTILE = [
    "",
    "\x00nul",
    "\ud800 half",
    "a" * 300_000,
    "'; DROP TABLE samples; --",
    "‮right to left",
    "\x1b[2J",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_can_be_recorded(writer, text):
    sample = make_sample(
        0, response=text, prompt=[{"role": "user", "content": text}, {"content": None}, "odd"]
    )
    sample.label = {"answer": float("nan"), "set": {1}}
    sample.metadata = {"object": object()}
    writer.add("train", 0, group_entries([[sample]], "trained", reason=text))
    with record_of(writer) as record:
        [answer] = record.samples(Select())
    assert answer.response == text.replace("\ud800", "?")


@pytest.mark.parametrize("num_tokens", [3, 5000])  # in a piece with others, and by itself
def test_of_a_sample_that_a_filter_took_out_nothing_is_trained(writer, num_tokens):
    group = [make_sample(0), make_sample(0, 1, remove_sample=True)]
    for sample in group:
        sample.tokens, sample.response_length = [5] * (num_tokens + 1), num_tokens
    writer.add("train", 0, group_entries([group], "trained"))
    with record_of(writer) as record:
        masks = [record.tokens(answer.row).loss_mask for answer in record.samples(Select())]
    assert masks == [None, [0] * num_tokens]


def test_a_sample_without_tokens_or_rewards_is_recorded(writer):
    writer.add("train", 0, group_entries([Sample(), [Sample()]], "failed", "never generated"))
    with record_of(writer) as record:
        answers = record.samples(Select())
        assert [(a.reward, a.response, a.num_tokens) for a in answers] == [(None, "", 0)] * 2
        assert record.tokens(answers[0].row).ids == []


def test_the_file_stays_within_its_limit_and_the_newest_rollout_stays(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run-1", 2 * MIB)
    for rollout_id in range(20):
        text = f"{rollout_id} " * 60_000
        writer.add("train", rollout_id, group_entries([[make_sample(0, response=text)]], "trained"))
    with record_of(writer) as record:
        rows = record.rollouts()
        assert len(rows) == 20 and not rows[-1].pruned and rows[0].pruned
        assert len(record.samples(Select(rollout_id=19))) == 1 and record.samples(Select(rollout_id=0)) == []
    assert (tmp_path / "record.db").stat().st_size < 3 * MIB


def test_readers_see_a_live_record(writer, tmp_path):
    written = threading.Semaphore(0)
    original = writer._prune
    writer._prune = lambda: (original(), written.release())
    for rollout_id in (0, 1):
        writer.add("train", rollout_id, group_entries([[make_sample(0)]], "trained"))
        assert written.acquire(timeout=LONG_S)
    with open_record(tmp_path) as record:
        assert [row.rollout_id for row in record.rollouts()] == [0, 1]


def test_a_second_start_of_the_run_goes_on_in_the_same_record(tmp_path):
    for rollout_id in (0, 1):
        writer = RecordWriter(tmp_path / "record.db", "run-1", MIB)
        writer.add("train", rollout_id, group_entries([[make_sample(0)]], "trained"))
        writer.close()
        writer.close()
    with open_record(tmp_path) as record:
        assert len(record.rollouts()) == 2


def test_a_record_of_another_run_is_refused_and_left_alone(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run-1", MIB)
    writer.add("train", 0, group_entries([[make_sample(0)]], "trained"))
    writer.close()
    before = (tmp_path / "record.db").read_bytes()
    with pytest.raises(
        RecordError, match=r"is the record of run run-1, this is run run-2; use another folder"
    ):
        RecordWriter(tmp_path / "record.db", "run-2", MIB)
    assert (tmp_path / "record.db").read_bytes() == before


def test_what_is_no_record_is_named(tmp_path):
    with pytest.raises(RecordError, match="does not exist: the run has recorded no rollout yet"):
        open_record(tmp_path)
    (tmp_path / "record.db").write_bytes(b"not a database at all, but some text of enough length" * 40)
    with pytest.raises(RecordError, match="cannot be read"):
        open_record(tmp_path)
    with pytest.raises(RecordError, match=r"cannot be written: .* damaged: .* move record.db\* away"):
        RecordWriter(tmp_path / "record.db", "run-1", MIB)
    (tmp_path / "record.db").unlink()
    (tmp_path / "record.db").mkdir()
    with pytest.raises(RecordError, match="is not a file"):
        open_record(tmp_path)


def test_a_record_that_is_removed_under_the_run_is_told_once(writer, caplog):
    writer.flush()
    assert caplog.text == ""
    writer._path.unlink()
    for _ in range(2):
        writer.flush()
    assert caplog.text.count("was removed or replaced while the run writes to it") == 1


def test_what_another_process_locks_is_waited_for(writer, caplog):
    writer.flush()
    writer._connection.execute("PRAGMA busy_timeout = 10")
    with contextlib.closing(sqlite3.connect(writer._path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.add("train", 0, group_entries([[make_sample(0)]], "trained"))
        eventually(lambda: "is locked by another process" in caplog.text)
        other.execute("COMMIT")
    writer.flush()
    with record_of(writer) as record:
        assert [row.rollout_id for row in record.rollouts()] == [0]
    assert caplog.text.count("is locked by another process") == 1 and "not recorded" not in caplog.text


def test_a_record_that_does_not_say_whose_it_is_is_not_taken(tmp_path):
    writer = RecordWriter(tmp_path / "record.db", "run-1", MIB)
    writer.add("train", 0, group_entries([[make_sample(0)]], "trained"))
    writer.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection, connection:
        connection.execute("DELETE FROM meta WHERE key = 'run'")
    with pytest.raises(RecordError, match="is the record of run unknown, this is run run-1"):
        RecordWriter(tmp_path / "record.db", "run-1", MIB)


def test_another_schema_is_refused(tmp_path):
    RecordWriter(tmp_path / "record.db", "run-1", MIB).close()
    with sqlite3.connect(tmp_path / "record.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    connection.close()
    with pytest.raises(RecordError, match="has schema 99, this version of slime reads 6"):
        open_record(tmp_path)
    with pytest.raises(RecordError, match="has schema 99"):
        RecordWriter(tmp_path / "record.db", "run-1", MIB)


def test_samples_that_hold_what_no_column_can_are_told_and_the_others_are_recorded(writer, caplog):
    odd = make_sample(0)
    odd.status = "completed"  # as a rollout function of the user's may leave it
    writer.add("train", 0, group_entries([[odd]], "trained"))
    writer.flush()
    writer.add("train", 1, group_entries([[make_sample(1)]], "trained"))
    with record_of(writer) as record:
        assert [row.rollout_id for row in record.rollouts()] == [1]
    [told] = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert "samples of train 0: not recorded" in told and "value" in told


def test_a_write_that_fails_is_told_once_and_the_run_goes_on(writer, caplog):
    original = writer._write

    def full(rollout):
        if rollout.rollout_id < 2:
            raise sqlite3.OperationalError("database or disk is full")
        original(rollout)

    writer._write = full
    for rollout_id in range(3):
        writer.add("train", rollout_id, group_entries([[make_sample(0)]], "trained"))
    with record_of(writer) as record:
        assert [row.rollout_id for row in record.rollouts()] == [2]
    told = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(told) == 1 and "disk is full" in told[0] and "train 0" in told[0]


def test_one_file_holds_everything_after_the_end_also_if_somebody_reads(writer, tmp_path):
    writer.add("train", 0, group_entries([[make_sample(0)]], "trained"))
    with open_record(tmp_path) as early:
        early.rollouts()
        writer.close()
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "record.db").write_bytes((tmp_path / "record.db").read_bytes())
    with open_record(tmp_path / "copy") as copy:
        assert len(copy.samples(Select())) == 1


def test_a_damaged_file_is_one_clear_error(writer, tmp_path):
    for step in range(5):
        writer.add("train", step, group_entries([[make_sample(0, response="x" * 5000)]], "trained"))
    writer.close()
    data = (tmp_path / "record.db").read_bytes()
    (tmp_path / "record.db").write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    with pytest.raises(RecordError, match="cannot be read"), open_record(tmp_path) as record:
        record.samples(Select())


def test_why_there_is_no_record_is_told(tmp_path):
    with pytest.raises(RecordError, match="the run has recorded no rollout yet, or this is not its folder"):
        open_record(tmp_path)
    open_run_file(tmp_path, {"record_max_mib": {"value": 0, "source": "command line"}}, None, None, None)
    with pytest.raises(RecordError, match="the run keeps no record \\(--record-max-mib 0\\)"):
        open_record(tmp_path)
