"""A model writes where the replies of its sandbox pass: it is refused, and a forged reply is never believed.

The pipes of a sandbox that root starts belong to root, so these attacks only worked for an ordinary user:
`test_ordinary_user.py` runs this file as one.
"""

import asyncio
import json
import struct

import pytest
from isolation_kinds import usable
from patience import LONG_S

from slime.agent.sandbox import LocalSandbox, SandboxDied, SandboxError
from slime.agent.sandbox.isolation import BUBBLEWRAP, NAMESPACES, PLAIN

DESCRIPTORS = [f"/proc/self/fd/{number}" for number in range(3, 12)]


every_kind = pytest.mark.parametrize("kind", [usable(kind) for kind in (BUBBLEWRAP, NAMESPACES, PLAIN)])


def in_box(kind, work):
    async def inner():
        async with LocalSandbox(isolation=kind) as box:
            return await work(box)

    return asyncio.run(inner())


def frame(header, blob_length=0):
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), blob_length) + head


def forged_success():
    """Replies to the running write and to the next request, long enough to swallow the true ones."""
    swallowed = len(frame({"id": 1})) + 8
    success = {"id": 2, "code": 0, "reason": None, "out": 0, "cut": False, "seconds": 0.1}
    return frame({"id": 1}) + frame(success, swallowed)


async def written(box, path, content):
    try:
        await box.write_file(path, content)
    except SandboxError:
        return False
    return True


@every_kind
def test_a_model_that_writes_into_the_reply_pipe_cannot_turn_a_failure_into_a_success(kind):
    async def work(box):
        for path in DESCRIPTORS:
            if await written(box, path, forged_success()):
                break
        return await box.exec("exit 1", timeout=LONG_S)

    assert in_box(kind, work) == (1, "", "")


@every_kind
def test_files_of_the_kernel_and_files_that_are_not_regular_are_refused(kind):
    async def work(box):
        links = "ln -s /proc/self/fd/4 link; ln -s /proc indirect; mkfifo pipe; sleep 1000 < pipe &"
        await box.exec(f"({links}) >/dev/null 2>&1", check=True, timeout=LONG_S)
        for path in (
            *DESCRIPTORS,
            "//proc/self/fd/4",
            "/work/../proc/self/fd/4",
            "/proc/1/fd/4",
            "/proc/self/mem",
            "/proc/self/comm",
            "/dev/fd/4",
            "/dev/stdout",
            "/dev/null",
            "link",
            "indirect/self/comm",
            "pipe",
            ".",
        ):
            with pytest.raises(SandboxError, match="cannot be written"):
                await box.write_file(path, "forged")
        for path in ("/proc/self/environ", "/proc/1/status", "/dev/zero", "pipe"):
            with pytest.raises(SandboxError, match="cannot be read"):
                await box.read_file(path)
        await box.write_file("deep/file", "regular")
        await box.exec("ln -s deep/file plain-link", check=True)
        assert await box.read_file("plain-link") == "regular"

    in_box(kind, work)


@every_kind
def test_a_file_operation_holds_no_descriptor_of_the_first_process(kind):
    """A link that is swapped between the check and the opening leads to the child's own streams at most."""

    async def work(box):
        # The loop ends with the sandbox's folder, also where nobody kills what a program left running.
        links = "ln -sfn /proc/self/fd/4 /tmp/forged-$$; ln -sfn $PWD/calm /tmp/forged-$$"
        swap = f"while [ -d $PWD ]; do {links}; done; rm -f /tmp/forged-$$"
        await box.exec(f"echo $$ > name; ({swap}) </dev/null >/dev/null 2>&1 &", check=True)
        link = f"/tmp/forged-{(await box.read_file('name')).strip()}"
        for _ in range(30):
            await written(box, link, forged_success())
        assert (await box.exec(f"rm -f {link}; exit 1", timeout=LONG_S))[0] == 1

    in_box(kind, work)


@pytest.mark.parametrize(
    "forged",
    [
        frame({"id": 1, "code": 0, "reason": None, "out": 0, "cut": False, "seconds": 0.1}),
        frame({"id": "0" * 32, "code": 0}),
        frame({"code": 0}),
        frame([]),
        struct.pack(">II", 1 << 31, 0),
        struct.pack(">II", 2, 1 << 31) + b"{}",
        struct.pack(">II", 4, 0) + b"\xff\xfe{}",
    ],
)
def test_a_reply_that_answers_no_request_ends_the_sandbox(forged):
    async def work(box):
        asked = asyncio.create_task(box.exec("sleep 1000", timeout=1000))
        while not box._waiting:
            await asyncio.sleep(0)
        box._process.stdout.feed_data(forged)  # as if it came through the pipe
        with pytest.raises(SandboxDied, match="its first process did not write"):
            await asked
        with pytest.raises(SandboxDied):
            await box.exec("true")

    in_box(None, work)


def test_a_cancelled_command_does_not_make_its_late_reply_a_forged_one():
    async def work(box):
        for _ in range(20):
            task = asyncio.create_task(box.exec("true"))
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (await box.exec("echo alive", timeout=LONG_S))[1] == "alive\n"

    in_box(None, work)
