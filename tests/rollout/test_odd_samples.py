"""What functions of users' own put into samples: made good where one can see what is meant, else named."""

import copy
import sqlite3

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine
from ledger_world import World, finish, group_of
from rollout_helpers import make_args, make_source

from slime.batch.convert import samples_to_batch
from slime.record import Record, RecordWriter, group_entries
from slime.record.audit import audit
from slime.rollout import ledger as ledgers
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import follow
from slime.rollout.generation.returned import check_returned
from slime.rollout.ledger import Ledger
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate, generate_rollout
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample, flatten_samples

CHANGE = None  # of a test: what its generate function does to a sample


async def changed(args, sample, sampling_params):
    return CHANGE(await generate(args, sample, sampling_params))


@pytest.fixture(autouse=True)
def fresh():
    reset_breaker()
    yield
    ledgers.use(None)


def new_sample(sample):
    names = ("tokens", "response", "response_length", "rollout_log_probs", "status", "label")
    return Sample(**{name: getattr(sample, name) for name in names})


def without_numbers(sample):
    sample.index = sample.group_index = None
    return sample


def counted_by_numpy(sample):
    sample.index, sample.group_index = np.int64(sample.index), np.int64(sample.group_index)
    return sample


@pytest.mark.parametrize("change", [new_sample, without_numbers, counted_by_numpy])
def test_every_group_has_a_fate_whatever_number_a_generate_function_gives_its_samples(tmp_path, change):
    global CHANGE
    CHANGE = change
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--custom-generate-function-path", f"{__name__}.changed")
        path = tmp_path / "record.db"
        writer = RecordWriter(path, "run", 1 << 26)
        ledger, source = Ledger(writer, "s"), make_source(args)
        ledger.resumed(-1, -1)
        ledgers.use(ledger)
        follow(source, ledger)
        ledger.begin(0, "run:1")
        output = call_rollout_fn(generate_rollout, args, 0, source, evaluation=False)
        writer.add("train", 0, group_entries(output.samples, "trained"))
        ledger.account_for(0, flatten_samples(output.samples))
        ledger.cut(0)
        ledger.trained(0)
        writer.close()
    found = audit(path, finished=True)
    assert found.violations == []
    assert found.num_samples == 8 and found.groups == {"kept": 4}


def returned(**fields):
    source = Sample(index=3, group_index=1, prompt="2+2=")
    return check_returned("some.function", source, Sample(**fields), vocab_size=128)


def test_what_is_meant_by_a_returned_sample_is_made_good():
    made = returned(
        status="completed",
        metadata=None,
        response=None,
        tokens=np.array([5, 6]),
        loss_mask=torch.tensor([1, 0]),
        rollout_log_probs=(-0.5, -0.25),
        version_spans=[["run:1", 0, 2]],
        reward=torch.tensor(0.5),
    )
    assert made.status is Sample.Status.COMPLETED and made.metadata == {} and made.response == ""
    assert (made.tokens, made.loss_mask, made.rollout_log_probs) == ([5, 6], [1, 0], [-0.5, -0.25])
    assert made.version_spans == [("run:1", 0, 2)] and made.reward == 0.5
    assert (made.index, made.group_index) == (3, 1)


def test_numbers_of_numpy_and_torch_in_lists_are_numbers():
    made = returned(
        tokens=[np.int64(5), torch.tensor(6), 7],
        rollout_log_probs=[np.float32(-0.5), torch.tensor(-0.25), -1],
    )
    assert made.tokens == [5, 6, 7] and set(map(type, made.tokens)) == {int}
    assert [float(value) for value in made.rollout_log_probs] == [-0.5, -0.25, -1.0]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"status": "done"}, "status 'done'.*completed"),
        ({"status": None}, "status None"),
        ({"reward": np.array([1.0, 2.0])}, "reward is array.*a number"),
        ({"reward": "good"}, "reward is 'good'"),
        ({"response": 12345}, "response is 12345; it is the text"),
        ({"tokens": [5, -7]}, "the token id -7;"),
        ({"tokens": [5, 128]}, "the token id 128; .* which has 128 ids"),
        ({"tokens": ["5"]}, "the token id '5'"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, "the log-prob nan;"),
        ({"rollout_log_probs": [-0.5, None]}, "the log-prob None;"),
    ],
)
def test_what_nobody_can_guess_is_named_with_the_function(fields, what):
    with pytest.raises(PluginError, match=what) as error:
        returned(**fields)
    assert "--custom-generate-function-path some.function" in str(error.value)


def test_one_sample_returned_several_times_is_no_fan_out():
    source = Sample(index=3, group_index=1, prompt="2+2=")
    with pytest.raises(PluginError, match=r"some\.function .*returned one Sample several times"):
        check_returned("some.function", source, [source, source])


FIRST: list[Sample] = []  # that a generate function of a test got


def of_another_group(sample):
    sample.group_index += 1000
    return sample


def always_the_first(sample):
    FIRST.append(sample)
    return FIRST[0]


def the_first_with_new_numbers(sample):
    FIRST.append(sample)
    FIRST[0].index, FIRST[0].group_index = sample.index, sample.group_index
    return FIRST[0]


def beside_one_of_another_group(sample):
    other = copy.deepcopy(sample)
    other.group_index += 1
    return [sample, other]


def train_batch_of(tmp_path, change, *flags):
    global CHANGE
    CHANGE = change
    FIRST.clear()
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--custom-generate-function-path", f"{__name__}.changed", *flags)
        output = call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=False)
    return samples_to_batch(args, output.samples)


@pytest.mark.parametrize("change", [of_another_group, always_the_first, beside_one_of_another_group])
def test_a_generate_function_that_returns_another_sample_than_it_got_is_named(tmp_path, change):
    with pytest.raises(PluginError, match=r"returned sample \d+ \(group \d+\) for sample \d+ \(group \d+\)"):
        train_batch_of(tmp_path, change)


def test_one_object_with_the_numbers_of_many_samples_is_not_trained(tmp_path):
    with pytest.raises(ValueError, match=r"the same Sample object \d+ times"):
        train_batch_of(tmp_path, the_first_with_new_numbers)


def test_siblings_of_a_fan_out_may_have_indices_of_their_own():
    source = Sample(index=3, group_index=1, prompt="2+2=")
    made = check_returned("some.function", source, [Sample(index=12), Sample(index=13, group_index=1)])
    assert [(one.index, one.group_index) for one in made] == [(12, 1), (13, 1)]


def test_samples_that_a_data_source_did_not_number_may_be_numbered_by_the_function():
    made = check_returned("some.function", Sample(prompt="2+2="), Sample(index=7, group_index=2))
    assert (made.index, made.group_index) == (7, 2)


def swapping_hook(args, sample):
    FIRST.append(sample)
    return FIRST[0]


def test_a_hook_that_returns_another_sample_than_it_got_is_named(tmp_path):
    with pytest.raises(
        PluginError, match=r"--rollout-sample-hook-path .*returned sample \d+ .* for sample \d"
    ):
        train_batch_of(
            tmp_path, lambda sample: sample, "--rollout-sample-hook-path", f"{__name__}.swapping_hook"
        )


def circle():
    value: dict = {"score": 1.0}
    value["me"] = value
    return value


class Unsayable:
    def __str__(self):
        raise RuntimeError("no text")


ODD = {
    "a key of numpy": {"reward": {np.int64(3): 1.0}},
    "a key that is no text": {"reward": {(1, 2): 1.0}},
    "an array": {"reward": np.array([1.0, 2.0])},
    "a reward that holds itself": {"reward": circle()},
    "metadata that hold themselves": {"metadata": circle()},
    "a number of numpy": {"reward": np.float32(0.5)},
    "a number beyond all floats": {"reward": 10**400},
    "something without a text": {"reward": {"x": Unsayable()}},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_no_event_is_lost_over_what_a_sample_holds(tmp_path, fields):
    world = World(tmp_path)
    ledger = world.start()
    groups = [group_of(0), group_of(1)]
    ledger.begin(0, "run:1")
    ledger.issued(groups, from_buffer=False)
    made = [[finish(sample) for sample in group] for group in groups]
    vars(made[0][0]).update(fields)
    for group, done in zip(groups, made, strict=True):
        for before, after in zip(group, done, strict=True):
            ledger.finished(before, after)
    world.writer.flush()
    with sqlite3.connect(world.path) as connection:
        kept = {index for (index,) in connection.execute("SELECT sample_index FROM ledger_finished")}
    assert kept >= {1, 2, 3}, "those of the others are kept whole"
    ledger.consumed(made, "trained")
    world.writer.add("train", 0, group_entries(made, "trained"))
    ledger.cut(0)
    ledger.made(0, {"cursor": {}, "batch": {}})
    ledger.trained(0)
    found = world.audit()
    assert found.violations == [] and found.num_samples == 4 and found.unrecorded == []


def test_an_event_that_cannot_be_written_takes_no_other_with_it(tmp_path):
    world = World(tmp_path)
    ledger = world.start()
    ledger.issued([group_of(0)], from_buffer=False)
    ledger._note("dropped", group_index=0, value=object())
    ledger.consumed([group_of(0)], "filtered", "zero_std")
    found = world.audit()
    assert found.groups == {"dropped": 1}
    assert found.violations == ["1 events could not be written (a full disk?): the audit can prove nothing"]


@pytest.mark.parametrize("reason", ["cut \ud800", 7])
def test_a_group_may_be_dropped_for_any_reason(tmp_path, reason):
    world = World(tmp_path)
    ledger = world.start()
    ledger.issued([group_of(0)], from_buffer=False)
    ledger.consumed([group_of(0)], "filtered", reason)
    world.writer.add("train", 0, group_entries([group_of(0)], "filtered", reason))
    found = world.audit()
    assert found.violations == [] and found.groups == {"dropped": 1}
    with Record(world.path) as record:
        assert [row.num_samples for row in record.rollouts()] == [2]
