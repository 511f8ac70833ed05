"""The kernel's own limit on a sandbox's memory, if available: a cgroup v2 with `memory.max`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import uuid
from pathlib import Path

from slime.agent.sandbox.base import MIB, Limits

_OVERHEAD = 64 * MIB  # the first process, its shared memory folder and its pipes
_ENTER = 'echo $$ > "$0" && exec "$@"'
_TRIES, _WAIT_S = 200, 0.01


@functools.cache
def parent_group(proc: Path = Path("/proc/self")) -> Path | None:
    """Return a cgroup in which this process may make groups with a memory limit; None: there is none.

    Its own group, or the one above: a group that holds processes cannot give limits to groups inside.
    """
    own = _own_group(proc)
    for candidate in [] if own is None else [own, own.parent]:
        with contextlib.suppress(OSError):
            if "memory" not in (candidate / "cgroup.subtree_control").read_text().split():
                continue
            group = _make(candidate, Limits())
            try:
                done = subprocess.run([*entering(group), "true"], capture_output=True, timeout=20)
            finally:
                group.rmdir()
            if done.returncode == 0:
                return candidate
    return None


def _own_group(proc: Path) -> Path | None:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (proc / "cgroup").read_text().splitlines()
        path = next(line[3:] for line in lines if line.startswith("0::"))
        for line in (proc / "mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.split()[0] == "cgroup2":
                root, mounted = fields.split()[3:5]
                return Path(mounted) / os.path.relpath(path, root)
    return None


def _make(parent: Path, limits: Limits) -> Path:
    """Make a group for one sandbox. Its files are in memory too, so they are part of the limit."""
    group = parent / f"slime-sandbox-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    try:
        (group / "memory.max").write_text(str(limits.memory_bytes + limits.disk_bytes + _OVERHEAD))
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            (group / "memory.swap.max").write_text("0")
    except OSError:
        group.rmdir()
        raise
    return group


def make_group(limits: Limits) -> Path | None:
    """Return a new group for a sandbox with these limits; None where the kernel gives none."""
    parent = parent_group()
    return None if parent is None else _make(parent, limits)


def entering(group: Path | None) -> list[str]:
    """Return the beginning of a command line that puts the command into the group before it starts."""
    return [] if group is None else ["/bin/sh", "-c", _ENTER, str(group / "cgroup.procs")]


async def remove_group(group: Path) -> None:
    """Remove the group of a sandbox that ended; what is left of its processes is killed."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    for _ in range(_TRIES):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # a process has not gone yet
            await asyncio.sleep(_WAIT_S)
