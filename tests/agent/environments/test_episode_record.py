"""Episodes that a crash cut short continue in the turn in which it happened; no step is made twice."""

import sqlite3

import pytest
from environments_that_crash import TURNS, crash, effects
from fake_engine import FakeEngine
from recorded_starts import Start
from rollout_helpers import make_args, make_source

from slime.record.audit import audit
from slime.rollout import ledger as ledgers
from slime.utils.errors import RunStopped

EOS = 2  # <|im_end|> of the tiny tokenizer


def answer(payload, number):
    return {"tokens": [20, 21, 22, 23, EOS], "finish": "stop"}


@pytest.fixture(autouse=True)
def fresh():
    effects.clear()
    crash.update(at=None, after_step=False)
    yield
    ledgers.use(None)


def two_starts(folder, name, engine, at, *, after_step=False):
    choice = f"environments_that_crash:{name}"
    flags = ("--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "120")
    args = make_args(folder, engine, "--env", choice, *flags, max_context_len=400)
    args.n_samples_per_prompt = args.over_sampling_batch_size = 1
    args.custom_rm_path, args.label_key, args.prompt_data = None, None, f"env:{choice}#train:50"
    crash.update(at=at, after_step=after_step)
    with pytest.raises(RunStopped):
        Start(folder, 1).play(args, make_source(args))
    crash.update(at=None)
    before = len(engine.requests)
    [sample] = Start(folder, 2).play(args, make_source(args))
    return sample, len(engine.requests) - before, audit(folder / "record.db", finished=True)


def check_whole(sample):
    assert [end - start for start, end, _ in sample.turn_rewards] == [5] * TURNS
    assert sample.reward == TURNS and "episode_progress" not in sample.metadata
    for start, end, _ in sample.turn_rewards:
        first = len(sample.tokens) - sample.response_length
        assert sample.tokens[first + start : first + end] == [20, 21, 22, 23, EOS]
        assert all(sample.rollout_log_probs[start:end]) and sample.loss_mask[start:end] == [1] * 5


@pytest.mark.parametrize("name", ["Repeatable", "Pure"])
def test_an_episode_continues_in_the_turn_of_the_crash(name, tmp_path):
    with FakeEngine(answer) as engine:
        sample, asked, found = two_starts(tmp_path, name, engine, at=2)
    check_whole(sample)
    recorded = name == "Repeatable"  # its third response was recorded before the step
    assert asked == (1 if recorded else 2)
    assert found.violations == [] and (found.continued, found.restarted) == (1, 0)
    assert found.calls == TURNS and found.repeated_calls == 1
    assert len(effects) == (TURNS if recorded else TURNS + 2)  # Pure: its first two steps are replayed


def test_an_interrupted_step_that_must_not_be_repeated_starts_its_episode_again(tmp_path):
    with FakeEngine(answer) as engine:
        sample, asked, found = two_starts(tmp_path, "Saving", engine, at=2, after_step=True)
    check_whole(sample)
    assert asked == TURNS and len(effects) == len(set(effects)) == 3 + TURNS
    assert found.violations == [] and (found.continued, found.restarted) == (0, 1)


def test_an_environment_that_declares_nothing_starts_again(tmp_path):
    with FakeEngine(answer) as engine:
        sample, asked, found = two_starts(tmp_path, "Counter", engine, at=2)
    check_whole(sample)
    assert asked == TURNS and len(effects) == len(set(effects)) == 2 + TURNS
    assert found.violations == [] and (found.continued, found.restarted) == (0, 1)


def test_the_audit_finds_a_call_that_was_made_twice_and_one_without_a_result(tmp_path):
    with FakeEngine(answer) as engine:
        two_starts(tmp_path, "Repeatable", engine, at=2)
    with sqlite3.connect(tmp_path / "record.db") as connection:
        forged = "UPDATE ledger SET value = replace(value, 'true', 'false') WHERE event = 'called'"
        connection.execute(forged)
        connection.execute("DELETE FROM ledger WHERE event = 'replied' AND value LIKE '%.3\"}'")
    twice, without = audit(tmp_path / "record.db", finished=True).violations
    assert twice.endswith("was made twice") and "was trained without a result of call" in without
