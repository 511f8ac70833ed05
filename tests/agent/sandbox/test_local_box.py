"""What a local box does for whoever uses it, with each kind of isolation that works here."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from isolation_kinds import usable
from patience import LONG_S, eventually, longer_each_time

from slime.agent.sandbox import (
    BoxPool,
    CommandFailed,
    Limits,
    LocalSandbox,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    ensure_agent_user,
    exec_and_wait,
    open_sandbox,
)
from slime.agent.sandbox.isolation import BOOT, BUBBLEWRAP, NAMESPACES, PLAIN, has_private_users, why_not

KINDS = [usable(kind) for kind in (BUBBLEWRAP, NAMESPACES, PLAIN)]
WALLED = [usable(kind) for kind in (BUBBLEWRAP, NAMESPACES)]


def in_box(work, **options):
    async def inner():
        async with LocalSandbox(**options) as box:
            return await work(box)

    return asyncio.run(inner())


def alive_with(mark):
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]


@pytest.mark.parametrize("kind", KINDS)
def test_commands_give_code_output_and_errors(kind):
    async def work(box):
        assert isinstance(box, Sandbox)
        assert await box.exec("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
        assert await box.exec("cat; echo $GIVEN", stdin=b"in ", env={"GIVEN": "x"}) == (0, "in x\n", "")
        assert (await box.exec("kill -9 $$"))[0] == 137
        with pytest.raises(CommandFailed, match="exit code 4 of 'exit 4'"):
            await box.exec("exit 4", check=True)
        assert (await box.exec("python3 -c 'print(6 * 7)'"))[1] == "42\n"

    in_box(work, isolation=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_in_and_come_out_whole(kind, tmp_path):
    every_byte = bytes(range(256)) * 4096
    (tmp_path / "here").write_bytes(every_byte)

    async def work(box):
        await box.write_file("deep/folder/text", "ä\n")
        assert await box.read_file("deep/folder/text") == "ä\n"
        await box.write_file("copied", Path(tmp_path / "here"))
        assert await box.read_bytes("copied") == every_byte
        assert await box.read_file("never/written") == ""
        with pytest.raises(SandboxError, match="cannot be read"):
            await box.read_file("deep")
        await box.exec("mkfifo waits", check=True)
        with pytest.raises(SandboxError, match="waits cannot be read"):
            await box.read_file("waits")

    in_box(work, isolation=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_past_its_time_ends_and_the_box_stays_usable(kind):
    mark = f"late-{kind}-{os.getpid()}"

    async def work(box):
        stays = f"(exec -a {mark} sleep 1000)"
        for limit in longer_each_time(0.3):
            code, out, err = await box.exec(f"echo first; {stays} & {stays}", timeout=limit)
            assert code == 124 and f"ran past its limit of {limit:g} s" in err
            if out == "first\n":
                break
        assert out == "first\n"
        assert (await box.exec("echo alive"))[1] == "alive\n"
        async with asyncio.timeout(LONG_S):
            while alive_with(mark):
                await asyncio.sleep(0.01)

    in_box(work, isolation=kind)


def test_commands_run_beside_each_other_in_one_box():
    async def work(box):
        slow = asyncio.create_task(box.exec("while [ ! -e go ]; do sleep 0.01; done; echo went"))
        await box.exec("touch go", check=True)
        assert (await slow)[1] == "went\n"
        outputs = await asyncio.gather(*(box.exec(f"echo {i}") for i in range(20)))
        assert [out for _, out, _ in outputs] == [f"{i}\n" for i in range(20)]

    in_box(work)


def test_a_cancelled_command_is_ended():
    mark = f"cancelled-{os.getpid()}"

    async def work(box):
        task = asyncio.create_task(box.exec(f"exec -a {mark} sleep 1000"))
        while not alive_with(f"{mark} 1000"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(LONG_S):
            while alive_with(mark):
                await asyncio.sleep(0.01)
        assert (await box.exec("true"))[0] == 0

    in_box(work)


def test_a_box_that_is_over_says_so():
    async def inner():
        box = LocalSandbox()
        with pytest.raises(SandboxDied, match="not started"):
            await box.exec("true")
        async with box:
            pass
        with pytest.raises(SandboxDied, match="closed"):
            await box.exec("true")

    asyncio.run(inner())


def test_long_commands_are_waited_for_and_ended_when_out_of_time():
    mark = f"long-{os.getpid()}"

    async def work(box):
        assert await exec_and_wait(box, "sleep 0.05; exit 7", LONG_S, "quick", poll_sec=0.05) == 7
        assert await exec_and_wait(box, f"exec -a {mark} sleep 1000", 0.2, "slow", poll_sec=0.05) == -1
        async with asyncio.timeout(LONG_S):
            while alive_with(mark):
                await asyncio.sleep(0.01)

    in_box(work)


@pytest.mark.parametrize("kind", WALLED)
def test_the_agent_user_owns_its_folder(kind):
    async def work(box):
        await ensure_agent_user(box, "/testbed")
        code, out, _ = await box.exec("cd /testbed && touch mine && echo $HOME", user="agent")
        assert (code, out) == (0, "/home/agent\n")

    in_box(work, isolation=kind)


def test_a_pool_hands_out_fresh_boxes_and_starts_the_next():
    async def inner():
        async with BoxPool(num_ready=2, num_boxes=3) as pool:
            async with pool.box() as first, pool.box() as second:
                assert first.sandbox_id != second.sandbox_id
                await first.write_file("/work/secret", "x")
            async with pool.box() as third:
                assert await third.read_file("/work/secret") == ""

    asyncio.run(inner())


def test_a_pool_never_has_more_boxes_in_use_than_it_may():
    async def inner():
        in_use = most = 0
        async with BoxPool(num_ready=1, num_boxes=2) as pool:

            async def episode():
                nonlocal in_use, most
                async with pool.box() as box:
                    in_use += 1
                    most = max(most, in_use)
                    await box.exec("true", check=True)
                    in_use -= 1

            await asyncio.gather(*(episode() for _ in range(6)))
        assert 1 <= most <= 2

    asyncio.run(inner())


def test_a_ready_box_that_was_killed_is_not_handed_out():
    async def inner():
        async with BoxPool(num_ready=1) as pool:
            ready = await pool._ready[0]
            ready._process.kill()
            await ready._process.wait()
            await ready._reader
            async with pool.box() as box:
                assert (await box.exec("true"))[0] == 0

    asyncio.run(inner())


def test_programs_that_try_a_kind_at_the_same_time_do_not_end_each_other():
    code = f"from slime.agent.sandbox.isolation import why_not; print(why_not({PLAIN!r}))"
    tries = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [each.communicate(timeout=LONG_S)[0].strip() for each in tries] == ["None"] * 4


@pytest.mark.skipif(not has_private_users(), reason="only root gives each box a user of its own")
def test_what_is_left_of_a_box_without_walls_ends_with_it():
    mark = f"left-{os.getpid()}"

    async def work(box):
        await box.exec(f"setsid bash -c 'exec -a {mark} sleep 1000' </dev/null >/dev/null 2>&1 &", check=True)
        async with asyncio.timeout(LONG_S):
            while not alive_with(f"{mark} 1000"):
                await asyncio.sleep(0.01)
        with pytest.raises(SandboxDied, match="the sandbox ended"):
            await box.exec("kill -9 $PPID; sleep 1000")

    in_box(work, isolation=PLAIN)
    eventually(lambda: not alive_with(mark))  # it is killed; a busy machine ends it a moment later


def test_wrong_settings_are_named():
    async def unknown():
        async with open_sandbox("dock"):
            pass

    with pytest.raises(ValueError, match="--sandbox is 'dock'; choose from local, plain, e2b, daytona"):
        asyncio.run(unknown())


def test_a_box_that_cannot_start_says_why():
    async def inner():
        async with LocalSandbox(isolation=BUBBLEWRAP, read_only=("/no/such/folder",)):
            pass

    if why_not(BUBBLEWRAP) is None:
        with pytest.raises(SandboxUnavailable, match="/no/such/folder"):
            asyncio.run(inner())


@pytest.mark.parametrize("kind", WALLED)
def test_the_files_of_a_sandbox_are_those_of_the_packed_one(kind):
    async def inner():
        async with LocalSandbox(isolation=kind) as first, LocalSandbox(isolation=kind) as second:
            await first.exec(
                "echo a > a; mkdir -p /tmp/d; echo b > /tmp/d/b; ln -s /work/a /tmp/d/link; chmod 750 a; "
                "rm /etc/hosts; head -c 3000000 /dev/urandom > /work/big; sleep 1000 >/dev/null 2>&1 &",
                check=True,
            )
            await second.exec("mkdir -p x/y; echo old > x/y/z; echo old > a; ln -s a more", check=True)
            for _ in range(2):  # also over itself
                await second.unpack(await first.pack())
            look = "find / -xdev -not -path '/dev*' -not -path '/proc*' -printf '%p %y %m %s %l\\n' | sort"
            there, here = [(await box.exec(f"{look}; cksum /work/big"))[1] for box in (first, second)]
            assert "/tmp/d/link l 777 7 /work/a" in there and there == here
            assert (await second.exec("cat /tmp/d/link; python3 -c 'print(6 * 7)'"))[1] == "a\n42\n"
            assert "sleep 1000" not in (await second.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))[1]

    asyncio.run(inner())


@pytest.mark.parametrize("kind", WALLED)
def test_a_sandbox_that_is_too_large_to_be_packed_says_so_and_stays_usable(kind):
    async def work(box):
        await box.exec("touch $(seq 3000)", check=True)  # an archive has half a KiB for each
        with pytest.raises(SandboxError, match="too large"):
            await box.pack()
        assert (await box.exec("echo on"))[1] == "on\n"

    in_box(work, isolation=kind, limits=Limits(disk_bytes=1 << 20, output_bytes=1 << 19))


@pytest.mark.parametrize("sent", [b"", b"1", b"10\nimport"])
def test_a_first_process_whose_run_dies_before_its_program_is_sent_ends(sent):
    command = [sys.executable, "-I", "-S", "-B", "-c", BOOT]
    assert subprocess.run(command, input=sent, timeout=60).returncode == 1
