"""Episodes of sessions and tools that a crash cut short continue in their turn; no call is made twice."""

import json
import sqlite3

import pytest
from fake_engine import FakeEngine
from recorded_starts import Start
from rollout_helpers import make_args, make_source, write_prompts
from sessions_that_crash import TURNS, crash, effects, program

from slime.agent import adapters
from slime.record.audit import audit
from slime.rollout import ledger as ledgers
from slime.utils.errors import RunStopped
from slime.utils.machine.ports import find_available_port

EOS = 2  # <|im_end|> of the tiny tokenizer
STEPS = [f"step {turn}" for turn in range(TURNS)]


def answer(payload, number):
    stop = {"finish_reason": {"type": "stop", "matched": EOS}}
    return {"tokens": [20 + number % 20, 21, 22, EOS], "finish": "stop", "meta": stop}


@pytest.fixture(autouse=True)
def fresh():
    effects.clear()
    crash.update(at=None, in_tool=False, other_way=False, lose=False)
    program.update(outlives=False, messages=[], urls=set(), statuses=[])
    yield
    ledgers.use(None)


def args_of(folder, engine, function, *flags):
    args = make_args(
        folder, engine, "--rollout-batch-size", "1", "--rollout-max-response-len", "100",
        "--custom-generate-function-path", f"sessions_that_crash.{function}", *flags, max_context_len=2000,
    )  # fmt: skip
    args.n_samples_per_prompt = args.over_sampling_batch_size = 1
    args.custom_rm_path = None
    return args


def two_starts(folder, tool, at, *, in_tool=False, other_way=False, function="generate", flags=()):
    write_prompts(folder / "prompts.jsonl", 4, metadata={"tool": tool})
    with FakeEngine(answer) as engine:
        args = args_of(folder, engine, function, *flags)
        crash.update(at=at, in_tool=in_tool)
        with pytest.raises(RunStopped):
            Start(folder, 1).play(args, make_source(args))
        crash.update(at=None, other_way=other_way)
        before = len(engine.requests)
        stop_adapters()  # the next start is another process
        [sample] = Start(folder, 2).play(args, make_source(args))
        stop_adapters()
        return sample, len(engine.requests) - before, audit(folder / "record.db", finished=True)


def stop_adapters():
    while adapters._adapters:
        adapters._adapters.popitem()[1].stop()


def check_whole(sample):
    first = len(sample.tokens) - sample.response_length
    assert [turn["trained"] for turn in sample.metadata["turns"]] == [True] * TURNS
    for turn in sample.metadata["turns"]:
        start, end = turn["start"], turn["end"]
        assert sample.tokens[first + start : first + end][1:] == [21, 22, EOS]
        assert all(sample.rollout_log_probs[start:end])
    assert len(sample.version_spans) >= 1 and "episode_log" not in sample.metadata
    assert sample.metadata.get("tool_calls", TURNS) == TURNS


@pytest.mark.parametrize("tool", ["once", "repeatable", "CountingAgain", "Saving"])
def test_an_episode_continues_in_the_turn_of_the_crash(tool, tmp_path):
    sample, asked, found = two_starts(tmp_path, tool, at=2)
    check_whole(sample)
    assert asked == 1
    again = STEPS[:2] if tool == "CountingAgain" else []  # which builds up what its object holds
    assert effects == STEPS[:2] + again + STEPS[2:]
    assert found.violations == [] and (found.continued, found.restarted) == (1, 0)
    assert (found.calls, found.repeated_calls) == (TURNS, len(again))
    if tool in ("CountingAgain", "Saving"):
        assert sample.reward == TURNS


def test_an_interrupted_call_that_may_be_repeated_is_made_again(tmp_path):
    sample, asked, found = two_starts(tmp_path, "repeatable", at=2, in_tool=True)
    check_whole(sample)
    assert asked == 1 and effects == STEPS[:3] + STEPS[2:]
    assert found.violations == [] and (found.continued, found.restarted) == (1, 0)
    assert (found.calls, found.repeated_calls) == (TURNS, 1)


@pytest.mark.parametrize("tool", ["once", "Saving"])
def test_an_interrupted_call_that_must_not_be_repeated_starts_its_episode_again(tool, tmp_path, caplog):
    sample, asked, found = two_starts(tmp_path, tool, at=2, in_tool=True)
    check_whole(sample)
    assert asked == TURNS and effects == STEPS[:3] + STEPS
    assert found.violations == [] and (found.continued, found.restarted) == (0, 1)
    assert "which is not `repeatable`" in caplog.text
    assert sample.reward == (TURNS if tool == "Saving" else 0)


def test_a_tool_that_keeps_its_state_in_the_process_starts_its_episode_again(tmp_path, caplog):
    sample, asked, found = two_starts(tmp_path, "Counting", at=2)
    check_whole(sample)
    assert asked == TURNS and effects == STEPS[:2] + STEPS and sample.reward == TURNS
    assert found.violations == [] and (found.continued, found.restarted) == (0, 1)
    assert "keeps its state in the process of the run" in caplog.text


def test_a_generate_function_that_takes_another_way_is_counted_as_restarted(tmp_path, caplog):
    sample, asked, found = two_starts(tmp_path, "once", at=2, other_way=True)
    check_whole(sample)
    assert asked == TURNS and effects == STEPS  # calls with the same id and arguments are the same calls
    assert found.violations == [] and (found.continued, found.restarted) == (1, 1)
    assert "did not repeat 3 of its recorded turns and 0 calls" in caplog.text


def test_the_audit_finds_a_tool_call_that_was_made_twice(tmp_path):
    two_starts(tmp_path, "once", at=2)
    with sqlite3.connect(tmp_path / "record.db") as connection:
        [row] = connection.execute("SELECT * FROM ledger WHERE event = 'called' ORDER BY id LIMIT 1")
        assert json.loads(row[-1])["tool"] == "once"
        connection.execute(f"INSERT INTO ledger VALUES ({','.join('?' * len(row))})", (None, *row[1:]))
    twice, without = audit(tmp_path / "record.db", finished=True).violations
    assert twice.endswith("was made twice") and "without a result of call" in without


@pytest.mark.parametrize("outlives", [False, True], ids=["started again", "outlives the run"])
def test_a_program_behind_the_adapter_finds_its_session_again(outlives, tmp_path):
    program["outlives"] = outlives
    crash["port"] = find_available_port()
    sample, asked, found = two_starts(tmp_path, "none", at=2, function="over_http")
    check_whole(sample)
    assert asked == 1 and sample.metadata["session"]["num_forks"] == 0
    assert found.violations == [] and (found.continued, found.restarted) == (1, 0)
    assert program["statuses"] == ([503] if outlives else [])


@pytest.mark.parametrize("in_tool", [False, True], ids=["between calls", "in a command"])
def test_a_sandbox_is_restored_with_its_episode(in_tool, tmp_path):
    sample, asked, found = two_starts(tmp_path, "none", at=2, in_tool=in_tool, function="in_a_sandbox")
    check_whole(sample)
    assert asked == 1 and sample.metadata["log"] == "0\n1\n2\n3\n"
    assert found.violations == [] and (found.continued, found.restarted) == (1, 0)
    assert (found.calls, found.repeated_calls) == (TURNS, int(in_tool))
    assert list((tmp_path / "episodes").iterdir()) == [], "files go with their episode"


def test_an_episode_whose_sandbox_is_lost_starts_again(tmp_path, caplog):
    crash["lose"] = True
    sample, _, found = two_starts(tmp_path, "none", at=2, function="in_a_sandbox")
    check_whole(sample)
    assert sample.metadata["log"] == "0\n1\n2\n3\n" and sample.reward == TURNS
    assert found.violations == [] and found.restarted == 1
    assert "the state of shell cannot be restored" in caplog.text


def test_an_episode_in_a_plain_sandbox_starts_again(tmp_path):
    flags = ("--sandbox", "plain")
    _, asked, found = two_starts(tmp_path, "none", at=2, function="in_a_sandbox", flags=flags)
    assert asked == TURNS and found.violations == [] and (found.continued, found.restarted) == (0, 1)


def test_a_call_that_its_function_cancels_is_no_violation(tmp_path):
    with FakeEngine(answer) as engine:
        args = args_of(tmp_path, engine, "impatient")
        [sample] = Start(tmp_path, 1).play(args, make_source(args))
    found = audit(tmp_path / "record.db", finished=True)
    assert sample.reward == 1.0 and (found.violations, found.calls) == ([], 1)
