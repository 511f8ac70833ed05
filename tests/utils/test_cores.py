"""Cores that a process may use: those it is bound to, and no more than its container's share of time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils.machine.cores import num_cores

BOUND = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tell(folder: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """What Linux says of a container, in files of our own."""
    mount = folder / "mount"
    mount.mkdir()
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    (folder / "cgroup").write_text(groups)
    return folder / "cgroup", mount


V2, V1 = "0::/pod/box\n", "3:cpuset:/\n2:cpu,cpuacct:/pod/box\n0::/\n"

SWAPPED = "2:cpuacct,cpu:/pod/box\n"  # where "cpu" and "cpuacct" are links to the folder "cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (V2, {"pod/box/cpu.max": "100000 100000"}, 1),
        (V2, {"pod/box/cpu.max": "50000 100000"}, 1),  # half a core is one thread
        (V2, {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "100000 100000"}, 1),  # the limit is above
        (V2, {"cpu.max": "150000 100000"}, 1),  # the group is the top of what a container sees
        (V2, {"pod/box/cpu.max": "max 100000"}, BOUND),
        (V2, {"pod/box/cpu.max": "100000000 100000"}, BOUND),  # more than there are
        (V2, {}, BOUND),
        (V2, {"cpu.max": "nonsense"}, BOUND),
        (V2, {"cpu.max": "1 0"}, BOUND),
        (V1, {f"cpu/pod/box/cpu.cfs_{k}_us": "100000" for k in ("quota", "period")}, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, BOUND),
        (SWAPPED, {f"cpu/pod/box/cpu.cfs_{k}_us": "100000" for k in ("quota", "period")}, 1),
        ("", {}, BOUND),
        ("nonsense\n0::\n", {"cpu.max": "100000 100000"}, BOUND),
    ],
)
def test_no_more_than_a_container_may_use(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    assert num_cores(*tell(tmp_path, groups, files)) == cores


def test_where_linux_says_nothing_it_is_what_the_process_is_bound_to(tmp_path: Path) -> None:
    assert num_cores(tmp_path / "none", tmp_path) == BOUND


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds processes to cores")
def test_a_process_bound_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from slime.utils.machine.cores import num_cores; print(num_cores())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"
