"""What must be alike on all hosts of a run: versions, clocks, room, network; and which host differs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from slime.preflight.findings import Finding
from slime.utils.machine import shm
from slime.utils.machine.accelerator import library_versions
from slime.utils.machine.ports import GLOO_INTERFACE, NCCL_INTERFACE, interface_towards

# Of which different versions on two hosts compute other numbers, or cannot read each other's data.
_PACKAGES = ("slime-rl", "torch", "transformers", "ray", "numpy", "megatron-core")
_LITTLE_ROOM = 1 << 30
_CLOCK_S = 5.0  # by how much clocks may differ
_NETWORK, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_NVIDIA = Path("/proc/driver/nvidia")  # also shows devices that this process may not use
_NO_GPU = "no GPU"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What one host says of itself. `room`: free bytes by folder; `interface`, `speed`: what ranks use there.

    `wrong_interface`: a variable of the user that names an interface which the host does not have.

    Example: HostFacts({"python": "3.12", "torch": "2.11.0"}, 1.7e9, {"/tmp": 1 << 40}, "eth0", "25 Gb/s",
    "8 x NVIDIA H200, driver 570.86").
    """

    versions: Mapping[str, str]
    clock: float
    room: Mapping[str, int]
    interface: str
    speed: str
    devices: str
    wrong_interface: str | None = None


def host_facts(address: str, folders: Iterable[str], env: Mapping[str, str]) -> HostFacts:
    """Return the facts of this host. `address`: by which others reach it; `env`: of its ranks."""
    given = {**os.environ, **env}
    own = interface_towards(address) or "no interface"
    interface, nccl = given.get(GLOO_INTERFACE) or own, given.get(NCCL_INTERFACE) or f"={own}"
    wrong = [name for name in interface.split(",") if name != own and name not in psutil.net_if_addrs()]
    room = {}
    for folder in dict.fromkeys([tempfile.gettempdir(), str(shm.FOLDER), *folders]):
        with contextlib.suppress(OSError):  # a missing folder is reported by the check of files
            room[folder] = shutil.disk_usage(folder).free
    shown = interface if nccl == f"={interface}" else f"{interface} (NCCL: {nccl})"
    return HostFacts(
        *(_versions(), time.time(), room, shown, _speed(interface.partition(",")[0]), _devices()),
        f"{GLOO_INTERFACE}={interface}" if wrong else None,
    )


def _devices() -> str:
    files = [path.read_text() for path in sorted(_NVIDIA.glob("gpus/*/information"))]
    names = Counter(text.partition("Model:")[2].partition("\n")[0].strip() for text in files)
    found = [f"{count} x {name}" for name, count in names.items()]
    with contextlib.suppress(OSError, IndexError):
        found.append(f"driver {re.findall(r'[0-9]+[.][0-9.]+', (_NVIDIA / 'version').read_text())[0]}")
    return ", ".join(found) if names else _NO_GPU


def _versions() -> dict[str, str]:
    """Return versions without their last parts that change no data: of Python, and of local builds."""
    found = {"python": platform.python_version().rpartition(".")[0]}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package).partition("+")[0]
    return found | library_versions()


def _speed(interface: str) -> str:
    """Return the speed of the link and of InfiniBand ports; a virtual link may report none."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        megabits = int((_NETWORK / interface / "speed").read_text())
        found += [f"{megabits / 1000:g} Gb/s"] if megabits > 0 else []
    rates = [path.read_text().strip() for path in sorted(_INFINIBAND.glob("*/ports/*/rate"))]
    found += [f"{count} x InfiniBand {rate}" for rate, count in Counter(rates).items()]
    return ", ".join(found) or "unknown speed"


def compare_hosts(facts: Mapping[str, HostFacts], asked: tuple[float, float]) -> Iterator[Finding]:
    """Yield how hosts differ from most of the others. `asked`: this host's clock before and after."""
    names = dict.fromkeys(name for one in facts.values() for name in one.versions)
    for name in names:
        found = {host: one.versions.get(name, "none") for host, one in facts.items()}
        if name in ("CUDA", "NCCL", "ROCm", "RCCL"):  # a host of Ray's head may have torch for CPUs
            found = {host: version for host, version in found.items() if version != "none"}
        yield from _odd_ones(f"version of {name}", found, "error", "install the same version on all hosts")
    speeds = {host: one.speed for host, one in facts.items()}
    yield from _odd_ones("network", speeds, "warning", "the slowest host decides the speed of all")
    devices = {host: one.devices for host, one in facts.items() if one.devices != _NO_GPU}
    yield from _odd_ones("devices", devices, "warning", "the slowest host decides the speed of all")
    for host, one in facts.items():
        if one.wrong_interface is not None:
            text = f"{one.wrong_interface}: this host has no such interface; leave it out, or correct it."
            yield Finding("error", host, text)
        wrong_s = max(asked[0] - one.clock, one.clock - asked[1], 0.0)
        if wrong_s > _CLOCK_S:
            text = f"its clock is {wrong_s:.0f} s off the driver's: times in logs, curves and traces mislead"
            yield Finding("warning", host, f"{text}; set it by NTP.")
        for folder, free in one.room.items():
            if free < _LITTLE_ROOM:
                yield Finding("warning", host, f"{folder} has {free / 2**20:.0f} MiB left.")


def _odd_ones(what: str, found: Mapping[str, str], kind: str, remedy: str) -> Iterator[Finding]:
    """Yield a finding for each host with another value than most have (the first, where it is a draw)."""
    if len(set(found.values())) < 2:
        return
    usual, count = Counter(found.values()).most_common(1)[0]
    for host, value in found.items():
        if value != usual:
            others = f"{count} other hosts have" if count > 1 else f"{_first(found, usual)} has"
            text = f"{what}: {value}, and {others} {usual}; {remedy}."
            yield Finding("error" if kind == "error" else "warning", host, text)


def _first(found: Mapping[str, str], value: str) -> str:
    return next(host for host, one in found.items() if one == value)


def host_lines(facts: Mapping[str, HostFacts]) -> list[str]:
    """Return a line per host, and one with the versions that all have."""
    lines = []
    for host, one in facts.items():
        room = ", ".join(f"{folder} {free / 2**30:.1f} GiB free" for folder, free in one.room.items())
        lines.append(f"  {host}: {one.devices}; {one.interface}, {one.speed}; {room}")
    first = next(iter(facts.values()))
    alike = {k: v for k, v in first.versions.items() if all(o.versions.get(k) == v for o in facts.values())}
    return [*lines, "  on all: " + ", ".join(f"{name} {version}" for name, version in alike.items())]
