"""How many cores this process may compute on: those that it is bound to, and no more than its container's
share of time on them. `os.cpu_count` says what the machine has, of which a container may have a sixteenth.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_cores(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """At least one. `groups` and `mount`: where Linux tells of the limits of a container."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for share in _shares(groups, mount) if share > 0]
    return max(1, min([bound, *map(int, shares)]))


def _shares(groups: Path, mount: Path) -> Iterator[float]:
    """Cores' worth of time that this process's control groups allow, theirs and those of all above them."""
    try:
        lines = os.fsdecode(groups.read_bytes()).splitlines()  # names of groups are bytes
    except OSError:  # not Linux, or a container that hides it
        return
    for line in lines:
        _, controllers, place = (*line.split(":", 2), "", "")[:3]
        if not place.startswith("/"):
            continue
        if not controllers:  # version 2: one tree for everything
            for folder in _upwards(mount, place):
                yield from _quotient(folder / "cpu.max")
        elif "cpu" in controllers.split(","):
            for name in {controllers, "cpu"}:  # the kernel may say "cpuacct,cpu" of what is at "cpu,cpuacct"
                for folder in _upwards(mount / name, place):
                    yield from _quotient(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")


def _upwards(mount: Path, place: str) -> Iterator[Path]:
    """A group's folder and those above it. In a container the top may stand for the group itself."""
    inside = PurePosixPath(place).relative_to("/")
    yield from (mount / part for part in (inside, *inside.parents))


def _quotient(*files: Path) -> Iterator[float]:
    """Quota over period, in microseconds; nothing where there is no limit ("max", -1) or no such file."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (int(word) for file in files for word in file.read_text().split())
        yield max(1.0, quota / period) if quota > 0 else 0.0
