"""Data sources of users' own: however they count they are followed; mistakes are named; none hangs a run."""

import numpy as np
import pytest
from fake_engine import FakeEngine
from rollout_helpers import make_args

from slime.record import RecordWriter, group_entries
from slime.record.audit import audit
from slime.rollout import ledger as ledgers
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection import collector
from slime.rollout.data_source import follow
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import check_groups
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import RunStopped
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample, flatten_samples


@pytest.fixture(autouse=True)
def fresh():
    reset_breaker()
    yield
    ledgers.use(None)


def numbered(number):
    return [Sample(group_index=number, index=number * 2 + i, prompt=f"q{number}") for i in range(2)]


class Source:
    """Hands out what came back first, as a buffer does; keeps no journal. `make`: a group by its number."""

    def __init__(self, make=numbered, give=list):
        self.make, self.give, self.number, self.buffer = make, give, 0, []

    def get_samples(self, num_samples):
        taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(taken) < num_samples:
            taken.append(self.make(self.number))
            self.number += 1
        return self.give(taken)

    def add_samples(self, groups):
        self.buffer += groups


def play(folder, source, *flags, num_rollouts=2):
    """So many rollouts with a ledger, and the audit of them."""
    path = folder / "record.db"
    writer = RecordWriter(path, "run", 1 << 26)
    ledger = Ledger(writer, "s")
    ledger.resumed(-1, -1)
    ledgers.use(ledger)
    follow(source, ledger)
    try:
        with FakeEngine() as engine:
            args = make_args(folder, engine, "--data-source-path", f"{__name__}.Source", *flags)
            for rollout_id in range(num_rollouts):
                ledger.begin(rollout_id, f"run:{rollout_id + 1}")
                output = call_rollout_fn(generate_rollout, args, rollout_id, source, evaluation=False)
                writer.add("train", rollout_id, group_entries(output.samples, "trained"))
                ledger.account_for(rollout_id, flatten_samples(output.samples))
                ledger.cut(rollout_id)
                ledger.trained(rollout_id)
    finally:
        writer.close()
    return audit(path, finished=True)


def gaps(number):
    return numbered(number * 7 + 100)


def of_numpy(number):
    return [
        Sample(group_index=np.int64(number), index=np.int64(number * 2 + i), prompt="q") for i in range(2)
    ]


def without_metadata(number):
    return [Sample(group_index=number, index=number * 2 + i, prompt="q", metadata=None) for i in range(2)]


@pytest.mark.parametrize("make", [gaps, of_numpy, without_metadata])
def test_however_a_source_counts_its_groups_are_followed(tmp_path, make):
    found = play(tmp_path, Source(make))
    assert found.violations == [] and found.num_samples == 16


def test_a_source_may_hand_out_again_what_came_back(tmp_path):
    found = play(tmp_path, Source(), "--over-sampling-batch-size", "6", num_rollouts=3)
    assert found.violations == [] and found.num_samples == 24


def test_groups_that_come_one_by_one_are_all_taken(tmp_path):
    found = play(tmp_path, Source(give=iter))
    assert found.violations == [] and found.groups == {"kept": 8}


def test_samples_without_numbers_are_said_to_have_none(tmp_path):
    source = Source(lambda number: [Sample(prompt="q"), Sample(prompt="q")])
    found = play(tmp_path, source, "--disable-rewards-normalization")
    assert found.violations == [] and found.unnumbered == [0, 1]


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        (None, "returned NoneType"),
        ([Sample(index=0)], "group 0 of get_samples is Sample"),
        ([numbered(0), []], "group 1 of get_samples is empty"),
        ([[{"prompt": "q"}]], "is a list of dict"),
        (["abc"], "is str"),
        ([[Sample(index="s1")]], "index 's1'; give it a whole number"),
        ([[Sample(group_index=0.5)]], "group_index 0.5"),
    ],
)
def test_what_is_no_group_is_named(groups, what):
    with pytest.raises(ValueError, match=what):
        check_groups(groups)


def test_a_source_that_gives_no_groups_is_named_with_its_flag(tmp_path):
    with pytest.raises(PluginError, match=r"--data-source-path .*returned NoneType; return a list of groups"):
        play(tmp_path, Source(give=lambda groups: None))


def drop_all(args, samples, **kwargs):
    return DynamicFilterOutput(keep=False, reason="too_easy")


def test_a_filter_that_keeps_nothing_ends_the_run_with_its_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "MAX_DROPPED", 50)
    monkeypatch.setattr(collector, "MAX_DROPPED_BATCHES", 1)
    with pytest.raises(RunStopped, match=r"drop_all dropped all of 50 groups of rollout 0 \(too_easy 50\)"):
        play(tmp_path, Source(), "--dynamic-sampling-filter-path", f"{__name__}.drop_all")
