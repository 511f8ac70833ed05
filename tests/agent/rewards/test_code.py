"""The code reward: programs in answers are tested in a box."""

import asyncio
import json

import pytest
from argument_helpers import declared
from patience import LONG_S, longer_each_time

from slime.agent.rewards.code import Checks, program_in, read_checks, same_output
from slime.rollout.rm_hub import async_rm
from slime.utils.reward_failure import RewardFailure
from slime.utils.types import Sample

DOUBLE = ["assert double(2) == 4", "assert double(-1) == -2", "assert double('a') == 'aa'"]


def answer(program):
    return f"I would write\n```python\n{program}\n```\nand that is it."


def score(program, label, **settings):
    sample = Sample(index=3, prompt="p", response=answer(program), label=label)
    return asyncio.run(async_rm(declared(rm_type="code", **settings), sample))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def double(x): return x * 2", 1.0),
        ("def double(x): return x + x if isinstance(x, int) else None", 2 / 3),
        ("def double(x): return 4", 1 / 3),
        ("def double(x", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("def double(x):\n    import os\n    os._exit(0)", 0.0),
        ("print('passed 3')\nraise SystemExit", 0.0),
    ],
)
def test_the_share_of_passed_asserts_is_the_reward(program, expected):
    assert score(program, DOUBLE, timeouts={"reward": LONG_S}) == pytest.approx(expected)


def test_a_test_that_hangs_costs_its_own_share_only():
    program = "def double(x):\n    if x == 2:\n        while True: pass\n    return x * 2"
    for seconds in longer_each_time(1.0):  # the others have as long, too
        share = score(program, DOUBLE, timeouts={"reward": seconds})
        assert share <= 0.7
        if share == pytest.approx(2 / 3):
            break
    assert share == pytest.approx(2 / 3)


def test_input_and_output_are_compared_outside_the_box():
    label = {"inputs": ["3\n", "5\n", "x\n"], "outputs": ["6", "10", "?"]}
    program = "n = int(input())\nprint(2 * n, '')"
    assert score(program, label) == pytest.approx(2 / 3)
    assert score(program, json.dumps(label)) == pytest.approx(2 / 3)


def test_a_program_sees_neither_the_tests_nor_the_machine():
    spy = "import glob\nprint(sorted(glob.glob('/tmp/*') + glob.glob('/work/*')))"
    label = [{"input": "", "output": "['/work/answer.py', '/work/input']"}]
    assert score(spy, label) == 1.0
    peek = "import os\ndef double(x): return x * 2 if not os.path.exists('/tmp/tests.json') else 0"
    assert score(peek, DOUBLE) == 1.0


def test_an_answer_without_a_program_scores_zero():
    sample = Sample(index=3, prompt="p", response="I do not know", label=DOUBLE)
    assert asyncio.run(async_rm(declared(rm_type="code"), sample)) == 0.0


@pytest.mark.parametrize("label", [None, "", [], {"inputs": ["1"], "outputs": []}, {"x": 1}, [1, 2]])
def test_a_label_without_tests_is_a_failure_with_a_name(label):
    failure = score("x = 1", label)
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "invalid"
    assert "sample 3" in failure.reason


def test_answers_wait_for_their_turn_and_all_are_scored():
    async def inner():
        args = declared(rm_type="code", limits={"sandboxes": 2})
        even = ["assert x % 2 == 0"]
        samples = [Sample(index=i, response=answer(f"x = {i}"), label=even) for i in range(8)]
        return await asyncio.gather(*(async_rm(args, sample) for sample in samples))

    assert asyncio.run(inner()) == [1.0, 0.0] * 4


def test_forms_of_labels_and_answers():
    assert read_checks("assert a\n\nassert b\n") == Checks(asserts=("assert a", "assert b"))
    assert read_checks([{"input": 1, "output": [1, 2]}]) == Checks(pairs=(("1", "1\n2"),))
    assert program_in("```python\none\n``` then ```py\ntwo\n```") == "two\n"
    assert program_in("none") is None
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a\nb", "a\nc")
