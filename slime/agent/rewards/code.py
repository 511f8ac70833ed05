"""`--rm-type code`: the share of a label's tests that the program in a response passes, run in a sandbox."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.agent.sandbox import Sandbox, SandboxDied, SandboxError, SandboxUnavailable, open_sandbox
from slime.arguments import PluginArgs
from slime.catalog.deadlines import timeout_s
from slime.catalog.limits import limit
from slime.utils.reward_failure import RewardFailure, infra_error, invalid
from slime.utils.types import Sample

MAX_TESTS = 100  # of one label; further ones are left out
MAX_TESTS_S = 120.0  # for all tests of a response together
_UNPROTECTED = "cannot protect the grader"
_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


async def code_reward(args: PluginArgs, sample: Sample, *, response: str) -> float | RewardFailure:
    """Return a score from 0 to 1; `--timeouts reward` limits each test.

    A response without a program, one that crashes and one that hangs score 0; a label without tests and a
    sandbox that does not work are reward failures.
    """
    try:
        tests = read_checks(sample.label)
    except ValueError as error:
        return invalid(f"--rm-type code: sample {sample.index}: {error}")
    program = program_in(response)
    if program is None:
        return 0.0
    try:
        async with open_sandbox(
            args.sandbox, image=args.sandbox_image, num_boxes=limit(args, "sandboxes")
        ) as box:
            passed = await count_passed(box, program, tests, timeout_s(args, "reward"))
    except SandboxUnavailable:
        raise  # no response of this run can be tested
    except SandboxError as error:
        return infra_error(f"--sandbox {args.sandbox}: {error}")
    return passed / min(tests.num, MAX_TESTS)


async def count_passed(box: Sandbox, program: str, tests: Checks, timeout_s: float) -> int:
    """Return how many of the tests a program passes in this sandbox."""
    if tests.asserts:
        return await _asserts(box, program, tests.asserts[:MAX_TESTS], timeout_s)
    await box.write_file(f"{box.workdir}/answer.py", program)
    passed, spent = 0, 0.0
    for number, (given, expected) in enumerate(tests.pairs[:MAX_TESTS]):
        if spent >= MAX_TESTS_S:
            break
        try:
            await box.write_file(f"{box.workdir}/input", given)
        except SandboxDied:
            raise
        except SandboxError:
            if number == 0:
                raise
            continue  # the program damaged its own sandbox: the test fails, not the reward
        code, out, _ = await box.exec(
            f"cd {shlex.quote(box.workdir)} && python3 -I answer.py < input", timeout=timeout_s, user="agent"
        )
        spent += timeout_s if code == 124 else 0.0
        passed += code == 0 and same_output(out, expected)
    return passed


async def _asserts(box: Sandbox, program: str, asserts: tuple[str, ...], timeout_s: float) -> int:
    secret = secrets.token_hex(16)
    grader, worker = grader_text()
    given = {"word": secret, "program": program, "tests": asserts, "seconds": timeout_s, "worker": worker}
    await box.write_file(f"{box.workdir}/.grader.py", grader)
    await box.write_file(f"{box.workdir}/.tests", json.dumps(given))
    # The shell becomes the grader, which removes the file of tests before the program runs anywhere.
    command = f"cd {shlex.quote(box.workdir)} && exec python3 -I .grader.py .tests"
    most = min(MAX_TESTS_S, timeout_s * len(asserts)) + 10
    code, out, err = await box.exec(command, timeout=most, user="agent")
    if code == 1 and _UNPROTECTED in err:
        raise SandboxError(err[-300:].strip())
    said, _, results = out.partition(" ")
    if code != 0 or not secrets.compare_digest(said.encode(), secret.encode()):
        return 0
    return results.split()[: len(asserts)].count("1")


@dataclass(frozen=True, slots=True)
class Checks:
    """Either asserts about the program's names, or pairs of standard input and expected output."""

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def num(self) -> int:
        return len(self.asserts) + len(self.pairs)


def program_in(response: str) -> str | None:
    """Return the last fenced block of a response; None: it has none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def read_checks(label: Any) -> Checks:
    """Read tests in any of the forms that datasets use; ValueError if there are none.

    A list of assert statements, or text with one a line; {"asserts": [...]}; {"inputs": [...], "outputs":
    [...]}; a list of {"input", "output"}; each also as JSON in a string.
    """
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # text that happens to start like JSON
            label = json.loads(label)
    if isinstance(label, str):
        label = [line for line in label.splitlines() if line.strip()]
    match label:
        case {"asserts": list(tests)} | list(tests) if tests:
            pass
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs) > 0:
            tests = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
        case _:
            raise ValueError(
                'a label for code is a list of asserts, or has as many "inputs" as "outputs"; this one has '
                "no tests"
            )
    if all(isinstance(one, str) for one in tests):
        return Checks(asserts=tuple(tests))
    if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in tests):
        return Checks(pairs=tuple((_text(one["input"]), _text(one["output"])) for one in tests))
    raise ValueError('each test is an assert statement, or an object with "input" and "output"')


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs without spaces at the ends of lines and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, expected))
    return first == second


@functools.cache
def grader_text() -> tuple[str, str]:
    """Return the programs of the grader and of its worker, as they are sent to a sandbox."""

    def text(names: tuple[str, ...], start: str) -> str:
        here = Path(__file__)
        sources = [here.with_name(name).read_text() for name in names]
        return "\n".join([*(f"exec(compile({source!r}, 'box', 'exec'))" for source in sources), start])

    worker = text(("grader_values.py", "grader_worker.py"), "work()")
    return text(("grader_values.py", "grader.py"), "main(sys.argv[1])"), worker
