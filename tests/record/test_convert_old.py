"""A record of the former format (`schema_5.db.gz`) is read, and converted when its run resumes."""

import contextlib
import gzip
import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from ledger_world import finish, group_of

from slime.cli.inspect import ledger as ledger_command
from slime.cli.inspect import samples as samples_command
from slime.record import LedgerReader, RecordError, RecordWriter, Select, open_record
from slime.record.actions import ask, read_actions
from slime.record.audit import audit
from slime.record.convert_old import loads
from slime.rollout.ledger import Ledger

MIB = 1 << 20
DIGEST = "a55831f42e89d3269bf1a71db17928f1"  # as the version that wrote the file computed it


@pytest.fixture(params=[False, True], ids=["in memory", "by its run"])
def old(request, tmp_path):
    """The folder of a run whose record has the former format; its run has converted it, or has not."""
    with gzip.open(Path(__file__).with_name("schema_5.db.gz")) as file:
        (tmp_path / "record.db").write_bytes(file.read())
    if request.param:
        RecordWriter(tmp_path / "record.db", "run", 64 * MIB, start=2).close()
        assert schema_of(tmp_path) == "6"
    return tmp_path


def schema_of(folder):
    with contextlib.closing(sqlite3.connect(folder / "record.db")) as connection:
        return connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0]


def test_nothing_of_the_history_changes(old):
    found = audit(old / "record.db", finished=False)
    assert (found.violations, found.digest, found.steps, found.num_events) == ([], DIGEST, [0], 21)


def test_the_numbers_of_all_samples_are_those_that_were_written(old):
    with open_record(old) as record:
        found = [record.tokens(answer.row) for answer in record.samples(Select(kind="train"))]
        large = [record.tokens(answer.row) for answer in record.samples(Select(kind="eval"))]
        advantages = [record.advantage(answer.row) for answer in record.samples(Select(kind="train"))]
    assert [t.ids for t in found] == [[5, 6, 7], [5, 6, 7], [70_000, 6, 7], [5, 6, 7]]
    assert [t.loss_mask for t in found] == [[1, 1], [0, 1], None, None]
    assert found[1].versions == [("run:1", 0, 1), ("run:2", 1, 2)] and found[0].versions == [("run:1", 0, 2)]
    assert found[0].log_probs == [float(np.float32(-0.1)), -0.25]
    assert [t.ids for t in large] == [list(range(5000))] * 2
    assert [(t.loss_mask, t.log_probs) for t in large] == [([1, 0, 0], [-0.5, -0.25, -0.125]), (None, None)]
    assert [a and (a.value, a.tokens) for a in advantages] == [
        (0.5, None),
        (-0.5, None),
        (0.25, [0.5, 0.0]),
        None,
    ]


def test_finished_samples_and_batches_are_those_that_were_stored(old):
    with LedgerReader(old / "record.db") as reader:
        known = reader.finished_entries("s")
        rollout = reader.rollouts_after(-1, "s")[0]
    writer = RecordWriter(old / "record.db", "run", 64 * MIB, start=3)
    ledger = Ledger(writer, "s", known=known)
    ledger.begin(1, "run:2")
    first, second = group_of(2)
    assert [ledger.recall(first), ledger.recall(second)] == [finish(first, 2), finish(second, 2)]
    odd = ledger.recall(group_of(3)[0])
    assert odd.reward == {"score": 0.5} and odd.metadata["note"] == {"nested": (1.5, None)}
    assert len(ledger.recall(group_of(4)[0])) == 2
    writer.close()
    batch, cursor = rollout["batch"], rollout["cursor"]
    assert [row.tolist() for row in batch["tokens"]] == [[0, 1, 2], [0, 1]]
    assert batch["tokens"][0].dtype == torch.int64 and batch["masks"][0].dtype == torch.int32
    assert torch.equal(batch["bf"], torch.tensor([1.5], dtype=torch.bfloat16)) and len(batch["empty"]) == 2
    assert batch["rewards"] == [1.0, 0.1, 0.0, 2.5, 1e300] and math.copysign(1, batch["rewards"][2]) == -1
    assert batch["np"].tolist() == [[0, 1], [2, 3]] and type(batch["scalar"]) is np.float32
    plain = {name: batch[name] for name in ("ids", "big", "names", "text", "bytes")}
    assert repr(plain) == repr(
        {"ids": [1, 2, 3, 70_000, -5], "big": 2**70, "names": ["a", None, True, 2], "text": "x\ud800",
         "bytes": b"\x00\xff"}
    )  # fmt: skip
    assert repr(cursor["buffer"]) == "[[{'a': 1, 'b': [2, 3]}, {'a': 2, 'b': []}], [{'a': 1, 'b': [9]}]]"
    assert (cursor["set"], cursor["tuple"], cursor["keys"]) == ({1, 2}, (1, (2,)), {1: "a", None: 2})
    assert cursor["table"] == [{"t": [("x", 1, 2)], "c": 1}] * 5 and rollout["num_samples"] == 4


def test_a_run_that_resumes_adds_to_a_converted_record(old):
    writer = RecordWriter(old / "record.db", "run", 64 * MIB, start=4)
    ledger = Ledger(writer, "s")
    ledger.resumed(-1, 0)
    ledger.trained(0)
    writer.close()
    found = audit(old / "record.db", finished=False)
    assert found.violations == [] and found.redone == 1 and schema_of(old) == "6"


def test_commands_on_the_folder_of_an_older_run_work(old, capsys):
    (old / "run.json").write_text("{}")
    ledger_command.main(["audit", str(old)])
    assert "conserved: every group has one" in capsys.readouterr().out
    assert samples_command.main([str(old)]) == 0 and "2+2=" in capsys.readouterr().out
    assert ask(old, "pause", None, "command line") > 0


def test_samples_that_are_damaged_are_left_out(old):
    with contextlib.closing(sqlite3.connect(old / "record.db")) as connection, connection:
        connection.execute("UPDATE ledger_finished SET payload = x'0102' WHERE group_index = 3")
        connection.execute("UPDATE ledger_rollouts SET payload = substr(payload, 1, 50)")
    if schema_of(old) == "6":
        return
    with LedgerReader(old / "record.db") as reader:
        assert {key[0] for key in reader.finished_entries("s")} == {4, 5, 8}
        assert reader.rollouts_after(-1, "s") == {}


def test_numbers_that_are_damaged_are_one_clear_error(old):
    if schema_of(old) == "6":
        return
    with contextlib.closing(sqlite3.connect(old / "record.db")) as connection, connection:
        connection.execute("UPDATE numbers_of_answers SET payload = x'0102'")
        connection.execute("UPDATE samples SET tokens = x'07' WHERE tokens IS NOT NULL")
    with open_record(old) as record:
        for answer in record.samples(Select()):
            with pytest.raises(RecordError, match=r"record\.db cannot be read: .* put a copy of it back"):
                record.tokens(answer.row)


def test_the_first_schema_is_converted(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection, connection:
        connection.executescript(
            "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE rollouts (id INTEGER PRIMARY KEY, kind TEXT, rollout_id INTEGER, time REAL,"
            " version TEXT, num_groups INTEGER, num_samples INTEGER, mean_reward REAL, pruned INTEGER);"
            "CREATE TABLE groups (id INTEGER PRIMARY KEY, rollout INTEGER, dataset TEXT, group_index INTEGER,"
            " prompt TEXT, prompt_hash INTEGER, label TEXT, outcome TEXT, reason TEXT);"
            "CREATE TABLE samples (id INTEGER PRIMARY KEY, group_row INTEGER, sample_index INTEGER, execution"
            " INTEGER, status TEXT, reward REAL, reward_parts TEXT, failure TEXT, response TEXT, num_tokens"
            " INTEGER, tokens BLOB, log_probs BLOB, loss_mask BLOB, versions TEXT);"
            "INSERT INTO meta VALUES ('schema', '1'), ('run', 'run');"
            "INSERT INTO rollouts VALUES (1, 'train', 0, 1.0, 'run:1', 1, 1, 1.0, 0);"
            "INSERT INTO groups VALUES (1, 1, NULL, 0, '2+2=', 5, '4', 'trained', NULL);"
            "INSERT INTO samples VALUES (1, 1, 0, NULL, 'completed', 1.0, NULL, NULL, '4', 2,"
            " x'02050006000700', NULL, x'0200000200', '[[\"run:1\", 0, 2]]');"
        )
    RecordWriter(tmp_path / "record.db", "run", 64 * MIB).close()
    with open_record(tmp_path) as record:
        tokens = record.tokens(record.samples(Select())[0].row)
    assert (tokens.ids, tokens.loss_mask, tokens.versions) == ([5, 6, 7], [1, 1], [("run:1", 0, 2)])
    asked = ask(tmp_path, "pause", None, "command line")
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        assert [row.id for row in read_actions(tmp_path, connection)] == [asked]


def test_bytes_that_end_early_are_one_clear_error():
    with pytest.raises(ValueError, match="these bytes are damaged"):
        loads(b"L\x02\x00\x00\x00N")
