"""Starts of the rollout side of a run, one after another, on one record."""

from slime.record import LedgerReader, RecordWriter, group_entries
from slime.rollout import ledger as ledgers
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import follow
from slime.rollout.ledger import Ledger
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples


class Start:
    """One start of the rollout side, as in a run: it reads what the starts before it recorded."""

    def __init__(self, folder, number):
        self.path, known = folder / "record.db", {}
        self.writer = RecordWriter(self.path, "run", 64 << 20, start=number)
        with LedgerReader(self.path) as reader:
            known = {"known": reader.finished_entries("s"), "episodes": reader.unfinished_episodes("s")}
        self.ledger = Ledger(self.writer, "s", folder=folder / "episodes", **known)
        self.ledger.resumed(-1, -1)
        ledgers.use(self.ledger)

    def play(self, args, source):
        follow(source, self.ledger)
        self.ledger.begin(0, "run:1")
        try:
            output = call_rollout_fn(generate_rollout, args, 0, source, evaluation=False)
            self.writer.add("train", 0, group_entries(output.samples, "trained"))
            self.ledger.cut(0)
            self.ledger.trained(0)
            return flatten_samples(output.samples)
        finally:
            self.writer.close()
