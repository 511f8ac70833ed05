"""`--rm-type code`: the share of a label's tests that the program in an answer passes, run in a sandbox."""

from __future__ import annotations

import json
import logging
import secrets
import shlex

from slime.agent.rewards.programs import Checks, grader_text, program_in, read_checks, same_output
from slime.agent.sandbox import Sandbox, SandboxDied, SandboxError, SandboxUnavailable, open_sandbox
from slime.arguments import PluginArgs
from slime.utils.reward_failure import RewardFailure, infra_error, invalid
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_TESTS = 100  # of one label; more are left out, told once
MAX_TESTS_S = 120.0  # for all tests of an answer together
_UNPROTECTED = "cannot protect the grader"


async def code_reward(args: PluginArgs, sample: Sample, *, response: str) -> float | RewardFailure:
    """0.0 to 1.0. Each test has --reward-timeout-s. Answers wait for one of --sandbox-num-boxes boxes.

    An answer without a program, one that crashes and one that hangs score 0; a label without tests and a
    box that cannot be had are failures with a name.
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
            args.sandbox, image=args.sandbox_image, num_boxes=args.sandbox_num_boxes
        ) as box:
            passed = await count_passed(box, program, tests, args.reward_timeout_s)
    except SandboxUnavailable:
        raise  # no answer of this run can be tested
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
            continue  # the program has spoiled its own sandbox, which is no failure of the reward
        code, out, _ = await box.exec(
            f"cd {shlex.quote(box.workdir)} && python3 -I answer.py < input", timeout=timeout_s, user="agent"
        )
        spent += timeout_s if code == 124 else 0.0
        passed += code == 0 and same_output(out, expected)
    return passed


async def _asserts(box: Sandbox, program: str, asserts: tuple[str, ...], timeout_s: float) -> int:
    word = secrets.token_hex(16)
    grader, worker = grader_text()
    given = {"word": word, "program": program, "tests": asserts, "seconds": timeout_s, "worker": worker}
    await box.write_file(f"{box.workdir}/.grader.py", grader)
    await box.write_file(f"{box.workdir}/.tests", json.dumps(given))
    # The shell becomes the grader, which removes the file of tests before the program runs anywhere.
    command = f"cd {shlex.quote(box.workdir)} && exec python3 -I .grader.py .tests"
    most = min(MAX_TESTS_S, timeout_s * len(asserts)) + 10
    code, out, err = await box.exec(command, timeout=most, user="agent")
    if code == 1 and _UNPROTECTED in err:
        raise SandboxError(err[-300:].strip())
    said, _, results = out.partition(" ")
    if code != 0 or not secrets.compare_digest(said.encode(), word.encode()):
        return 0
    return results.split()[: len(asserts)].count("1")
