"""A sandbox reports at its start which limits hold, and takes the kernel's own where they can be had."""

import asyncio
import logging

import pytest

from slime.agent.sandbox import Limits, LocalSandbox, cgroups, isolation

MIB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (isolation.BUBBLEWRAP, "resident memory, page tables and sockets are counted"),
        (isolation.NAMESPACES, "resident memory, page tables and sockets are counted"),
        (isolation.PLAIN, "not limited: memory of sockets, disk, number of files, user namespaces"),
    ],
)
def test_the_log_names_the_limits_of_each_kind_once(kind, expected, caplog):
    isolation.report_start.cache_clear()
    with caplog.at_level(logging.INFO):
        isolation.report_start(kind)
        isolation.report_start(kind)
    assert caplog.text.count(expected) == 1


def test_with_a_cgroup_the_kernel_limits_memory_and_without_one_the_log_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(isolation, "parent_group", lambda: tmp_path)
    assert "by the kernel (cgroup v2)" in isolation.limits_that_hold(isolation.BUBBLEWRAP)
    monkeypatch.setattr(isolation, "parent_group", lambda: None)
    assert "no cgroup v2 can be had" in isolation.limits_that_hold(isolation.BUBBLEWRAP)


def test_the_group_of_this_process_is_found_below_its_mount(tmp_path):
    (tmp_path / "cgroup").write_text("4:memory:/old\n0::/user.slice/run.scope\n")
    mounts = (
        "30 1 0:9 / / rw - ext4 x rw\n31 30 0:27 /user.slice /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
    )
    (tmp_path / "mountinfo").write_text(mounts)
    assert str(cgroups._own_group(tmp_path)) == "/sys/fs/cgroup/run.scope"
    (tmp_path / "cgroup").write_text("4:memory:/old\n")
    assert cgroups._own_group(tmp_path) is None


def test_a_sandbox_enters_its_group_before_anything_of_it_runs(monkeypatch, tmp_path):
    """A folder stands in for the kernel's: what is written there is what the kernel would read."""
    monkeypatch.setattr(cgroups, "parent_group", lambda: tmp_path)

    async def inner():
        async with LocalSandbox(limits=Limits(memory_bytes=64 * MIB, disk_bytes=32 * MIB)) as box:
            (group,) = tmp_path.iterdir()
            entered = int((group / "cgroup.procs").read_text())
            most = int((group / "memory.max").read_text())
            assert entered == box._process.pid
            assert 96 * MIB <= most <= 192 * MIB
            assert (group / "memory.swap.max").read_text() == "0"
            for file in group.iterdir():  # the kernel's files vanish with their folder
                file.unlink()
            monkeypatch.setattr(cgroups, "_TRIES", 1)
        assert (group / "cgroup.kill").read_text() == "1"

    asyncio.run(inner())


@pytest.mark.skipif(cgroups.parent_group() is None, reason="no cgroup v2 with a memory limit can be had here")
def test_the_kernel_ends_what_takes_too_much_memory_at_once():
    async def inner():
        limits = Limits(memory_bytes=64 * MIB, disk_bytes=1 * MIB)
        group = cgroups.make_group(limits)
        hog = "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1"
        process = await asyncio.create_subprocess_exec(*cgroups.entering(group), "python3", "-c", hog)
        code = await process.wait()
        await cgroups.remove_group(group)
        return code, group.exists()

    assert asyncio.run(inner()) == (-9, False)
