"""`--rm-type code`: the share of a label's tests that the program in an answer passes, run in a sandbox."""

from __future__ import annotations

import logging
import secrets

from slime.agent.rewards.programs import RUNNER, Checks, program_in, read_checks, same_output
from slime.agent.sandbox import Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from slime.arguments import PluginArgs
from slime.utils.reward_failure import RewardFailure, infra_error, invalid
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_TESTS = 100  # of one label; more are left out, told once
MAX_TESTS_S = 120.0  # for all tests of an answer together


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
    """How many of the tests a program passes in this box."""
    if tests.asserts:
        return await _asserts(box, program, tests.asserts[:MAX_TESTS], timeout_s)
    await box.write_file("/work/answer.py", program)
    passed, spent = 0, 0.0
    for given, expected in tests.pairs[:MAX_TESTS]:
        if spent >= MAX_TESTS_S:
            break
        await box.write_file("/work/input", given)
        code, out, _ = await box.exec(
            "cd /work && python3 -I answer.py < input", timeout=timeout_s, user="agent"
        )
        spent += timeout_s if code == 124 else 0.0
        passed += code == 0 and same_output(out, expected)
    return passed


async def _asserts(box: Sandbox, program: str, asserts: tuple[str, ...], timeout_s: float) -> int:
    word = secrets.token_hex(16)
    await box.write_file("/tmp/runner.py", RUNNER)
    await box.write_file("/tmp/tests", ascii((word, program, asserts, timeout_s)))
    # The file is gone before the program runs: it holds the word that counts as passed.
    command = "exec 3< /tmp/tests; rm -f /tmp/tests; cd /work; python3 -I /tmp/runner.py <&3"
    most = min(MAX_TESTS_S, timeout_s * len(asserts)) + 10
    code, out, _ = await box.exec(command, timeout=most, user="agent")
    said, _, results = out.strip().rpartition("\n")[2].partition(" ")
    if code != 0 or not secrets.compare_digest(said, word):
        return 0
    return results.split()[: len(asserts)].count("1")
