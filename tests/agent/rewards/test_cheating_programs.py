"""The code reward against programs that cheat, and against honest ones of every shape that tests use."""

import asyncio

import pytest
from argument_helpers import declared
from cheating_programs import CHEATS, LABEL
from isolation_kinds import usable
from patience import LONG_S

from slime.agent.rewards.code import Checks, count_passed
from slime.agent.sandbox import LocalSandbox
from slime.agent.sandbox.isolation import BUBBLEWRAP, NAMESPACES
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample


def num_passed(program, *asserts, kind=None):
    async def inner():
        async with LocalSandbox(isolation=kind) as box:
            return await count_passed(box, program, Checks(asserts=asserts), LONG_S)

    return asyncio.run(inner())


def test_the_corpus_is_large():
    assert len(CHEATS) >= 25


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheating_program_passes_no_test(name):
    assert num_passed(CHEATS[name], *LABEL) == 0


@pytest.mark.parametrize("kind", [usable(BUBBLEWRAP), usable(NAMESPACES)])
def test_the_right_program_passes_all_tests_of_the_corpus(kind):
    assert num_passed("def double(x): return x * 2", *LABEL, kind=kind) == len(LABEL)


HONEST = {
    "a generator": (
        "def f(n):\n    yield from range(n)",
        ["assert list(f(3)) == [0, 1, 2]", "assert 2 in f(3)"],
    ),
    "an endless generator": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        ["from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]"],
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        [
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1 and s.items == [1]",
            "assert isinstance(Stack(), Stack)",
        ],
    ),
    "operators of a class": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __str__(self): return f'V{self.x}'",
        ["assert V(1) + V(2) == V(3)", "assert V(1) + V(2) != V(4)", "assert str(V(5)) == 'V5'"],
    ),
    "a list that is changed in place": (
        "def order(a):\n    a.sort()",
        ["a = [3, 1]\nassert order(a) is None\nassert a == [1, 3]"],
    ),
    "errors": (
        "class Odd(ValueError): pass\ndef f(x):\n    if x % 2: raise Odd('odd')\n    return x",
        [
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'odd'",
            "try:\n    f(1)\n    assert False\nexcept Odd:\n    pass",
        ],
    ),
    "a function of the test": ("def f(g, x): return g(x) + 1", ["assert f(lambda x: x * 10, 3) == 31"]),
    "a built-in as argument": (
        "def f(t, x): return t(x)",
        ["assert f(int, '3') == 3", "assert f(len, 'ab') == 2"],
    ),
    "types of the standard library": (
        "from collections import *\nfrom fractions import Fraction\nimport datetime\n"
        "P = namedtuple('P', 'x y')\n"
        "def f():\n    own = P(1, 2), Counter('aab')\n"
        "    return *own, OrderedDict(a=1), deque([1]), Fraction(1, 3), defaultdict(int)\n"
        "def day(): return datetime.date(2024, 2, 29)",
        [
            "assert f()[0].y == 2 and f()[0] == (1, 2)",
            "assert f()[1] == {'a': 2, 'b': 1} and f()[1].most_common(1) == [('a', 2)]",
            "assert f()[2:] == (OrderedDict(a=1), deque([1]), Fraction(1, 3), {})",
            "import datetime\nassert day() == datetime.date(2024, 2, 29)",
        ],
    ),
    "plain values of every type": (
        "def f(x): return x",
        [
            "x = [1, -2.5, 'ä', b'b', None, True, (1,), {1: {2}}, 1j, 10 ** 5000, frozenset([3]), range(3)]\n"
            "y = f(x)\nassert y == x and [type(a) for a in y] == [type(a) for a in x]",
            "assert f(float('nan')) != f(float('nan')) and f(float('inf')) == float('inf')",
        ],
    ),
    "a function called like a built-in": ("def sum(a, b): return a * b", ["assert sum(3, 4) == 12"]),
    "a global of the program": ("LIMIT = 7", ["assert LIMIT == 7"]),
    "a helper that only the program imports": (
        "import math\nfrom math import *\ndef f(x): return x / 3",
        ["assert math.isclose(f(1), 1 / 3)", "assert isclose(f(2), 2 / 3) and f(pi) < 2"],
    ),
    "a check function": (
        "def f(x): return x + 1",
        ["def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\ncheck(f)"],
    ),
    "a dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int",
        ["assert P(1) == P(1) and P(1) != P(2) and P(3).x == 3"],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    program, asserts = HONEST[name]
    assert num_passed(program, *asserts) == len(asserts)


def test_a_program_that_spoils_its_sandbox_scores_zero_and_is_no_failure_of_the_reward():
    program = "import os\nos.remove('/work/input')\nos.mkdir('/work/input')\nprint('no')"
    label = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["1", "2", "3"]}
    sample = Sample(index=3, prompt="p", response=f"```python\n{program}\n```", label=label)
    assert asyncio.run(async_rm(declared(rm_type="code"), sample)) == 0.0
