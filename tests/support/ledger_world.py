"""A run folder with a ledger, as tests play it: groups, finished samples, steps, starts and crashes."""

import sqlite3

from slime.record import LedgerReader, RecordWriter, group_entries
from slime.record.audit import audit
from slime.rollout.ledger import Ledger
from slime.utils.types import Sample

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


def full_disk(*what):
    raise sqlite3.OperationalError("database or disk is full")
