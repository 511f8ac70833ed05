"""A rollout that a crash cut short: finished samples are used, the others are generated again."""

import pytest
import rollout_plugins
from fake_engine import FakeEngine, sample_index
from rollout_helpers import make_args, make_source

from slime.record import LedgerReader, RecordWriter, group_entries
from slime.record.audit import audit
from slime.rollout import ledger as ledgers
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import follow
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import without_response
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()
    yield
    ledgers.use(None)


class Process:
    """One start of the rollout side: a writer and a ledger that the rollout functions report to."""

    def __init__(self, folder, number, last_made=-1):
        self.path, known = folder / "record.db", {}
        if number > 1:
            with LedgerReader(self.path) as reader:
                known = reader.finished_entries("s")
        self.writer = RecordWriter(self.path, "run", 64 * MIB, start=number)
        self.ledger = Ledger(self.writer, "s", known=known)
        self.ledger.resumed(last_made, last_made)
        ledgers.use(self.ledger)

    def rollout(self, args, source, rollout_id=0):
        self.ledger.begin(rollout_id, f"run:{rollout_id + 1}")
        output = call_rollout_fn(generate_rollout, args, rollout_id, source, evaluation=False)
        self.writer.add("train", rollout_id, group_entries(output.samples, "trained"))
        self.ledger.account_for(rollout_id, flatten_samples(output.samples))
        self.ledger.cut(rollout_id)
        self.ledger.trained(rollout_id)
        return output


def seen(output):
    return [(s.index, s.tokens, s.rollout_log_probs, s.reward) for s in flatten_samples(output.samples)]


def test_only_what_was_not_finished_is_generated_again_and_the_batch_is_the_same(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, num_rollout=3)
        undisturbed = call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=False)
        first = Process(tmp_path, 1)
        first.ledger.begin(0, "run:1")
        for sample in flatten_samples(undisturbed.samples)[:5]:  # as far as it came
            first.ledger.finished(without_response(sample), sample)
        first.writer.close()
        second, source, before = Process(tmp_path, 2), make_source(args), len(engine.requests)
        follow(source, second.ledger)
        again = second.rollout(args, source)
        second.writer.close()
    assert seen(again) == seen(undisturbed)
    asked = {sample_index(request) for request in engine.requests[before:]}
    assert asked == {s.index for s in flatten_samples(undisturbed.samples)[5:]}
    found = audit(second.path, finished=True)
    assert found.violations == [] and found.recalled == 5 and found.num_samples == 8
