"""A reward for programs: the share of a row's tests that the last ```python block of the answer passes.

`label` is a list of assert statements (or text with one a line). Each answer runs in a process of its own
with limits on time, memory and file size. That keeps accidents away, not an adversary: where answers may be
hostile, run the whole training in a container without a network.
"""

import asyncio
import json
import re
import resource
import sys
import tempfile

SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 2**30, 2**20
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
RUN = """
import json, sys
program, tests = json.load(sys.stdin)
space, passed = {}, 0
exec(compile(program, "answer", "exec"), space)
for test in tests:
    try:
        exec(compile(test, "test", "exec"), space)
        passed += 1
    except Exception:
        pass
print(f"\\npassed {passed}")
"""


async def reward(args, sample):
    blocks = BLOCK.findall(sample.response)
    tests = sample.label if isinstance(sample.label, list) else sample.label.splitlines()
    tests = [test for test in tests if test.strip()]
    if not blocks or not tests:
        return 0.0
    return await count_passed(blocks[-1], tests) / len(tests)


async def count_passed(program, tests):
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", RUN),
            cwd=folder,
            env={},
            preexec_fn=_limit,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            talk = process.communicate(json.dumps([program, tests]).encode())
            output, _ = await asyncio.wait_for(talk, timeout=6 * SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            return 0
    last = output.decode(errors="replace").rpartition("\npassed ")[2].strip()
    return min(int(last), len(tests)) if process.returncode == 0 and last.isdigit() else 0


def _limit():
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
