"""Counts the cores that this process may use: its CPU affinity, limited by the CPU quota of its container.

`os.cpu_count` reports the whole machine, of which a container may have a sixteenth.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_cores(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the number of cores, at least 1. `groups`, `mount`: where Linux reports container limits."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for share in _shares(groups, mount) if share > 0]
    return max(1, min([bound, *map(int, shares)]))


def _shares(groups: Path, mount: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control groups and all their parents."""
    try:
        lines = os.fsdecode(groups.read_bytes()).splitlines()  # names of groups are bytes
    except OSError:  # not Linux, or a container that hides it
        return
    for line in lines:
        _, controllers, place = (*line.split(":", 2), "", "")[:3]
        if not place.startswith("/"):
            continue
        inside = PurePosixPath(place).relative_to("/")
        for part in (inside, *inside.parents):  # in a container the root may be the group itself
            if not controllers:  # version 2: one tree for everything
                yield from _quotient(mount / part / "cpu.max")
            elif "cpu" in controllers.split(","):  # "cpu" is a link to "cpu,cpuacct"
                folder = mount / "cpu" / part
                yield from _quotient(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")


def _quotient(*files: Path) -> Iterator[float]:
    """Yield quota over period; nothing if there is no limit ("max", -1) or no such file."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (int(word) for file in files for word in file.read_text().split())
        yield max(1.0, quota / period) if quota > 0 else 0.0
