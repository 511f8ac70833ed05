"""Counts the memory that the processes of a local sandbox use, for its first process.

The text of this file is sent to the sandbox before `guest_agent.py`, so it uses only the standard library of
Python >= 3.8. Resident memory is not all: page tables and socket buffers belong to the kernel, and grow
without any process growing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_MAPS = 65_530  # of a process, where the kernel's limit is the usual one
_SOCK_DIAG, _DUMP_REQUEST, _DONE, _ERROR = 20, 0x301, 3, 2
_SOCKET_BYTES = 212_992  # what a socket may hold, for kernels that do not report it


def process_memory(pid: int, exact: bool = False) -> int:
    """Return resident bytes and page tables. `exact`: shared pages are divided among users, which is slow."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    found = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Vm")}
    resident = found.get(b"VmRSS:", 0)
    if exact:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            shared = [int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")]
            resident = shared[0] if shared else resident
    return resident + found.get(b"VmPTE:", 0)


def count_maps(pid: int) -> int:
    """Return the number of mappings of a process; the kernel needs some 200 bytes for each."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return file.read().count(b"\n")
    except PermissionError:  # it hides them
        return MOST_MAPS
    except OSError:
        return 0


def socket_use() -> tuple[int, int]:
    """Return the number of sockets of this network namespace and the bytes that they hold."""
    try:
        sizes = [size for family, protocol in SOCKET_KINDS for size in _dump(family, protocol)]
    except OSError:
        number = sum(_num_lines(name) for name in ("unix", "tcp", "tcp6", "udp", "udp6"))
        sizes = [_SOCKET_BYTES] * number
    sizes += _netlink_sizes()
    return len(sizes), sum(sizes)


SOCKET_KINDS = [(1, 0), (2, 6), (2, 17), (10, 6), (10, 17)]  # unix; TCP and UDP over IPv4 and IPv6


def _dump(family: int, protocol: int) -> Iterator[int]:
    """Ask the kernel for all sockets of a family; yield the bytes in the buffers of each."""
    if family == 1:
        request, head, wanted = struct.pack("=BBHIIIII", 1, 0, 0, 0xFFFFFFFF, 0, 0x20, 0, 0), 16, 5
    else:
        request = struct.pack("=BBBBI", family, protocol, 1 << 6, 0, 0xFFFFFFFF) + bytes(48)
        head, wanted = 72, 7
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as asked:
        asked.settimeout(1)
        asked.send(struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG, _DUMP_REQUEST, 1, 0) + request)
        while True:
            data, at = asked.recv(1 << 16), 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not report sockets of this family")
                yield _buffered(data, at + 16 + head, at + length, wanted)
                at += (length + 3) & ~3


def _buffered(data: bytes, at: int, end: int, wanted: int) -> int:
    while at + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, at)
        if kind == wanted:
            received, _, sent, _, reserved = struct.unpack_from("=5I", data, at + 4)
            return int(received + sent + reserved)
        at += max(4, (length + 3) & ~3)
    return 0


def _netlink_sizes() -> list[int]:
    try:
        with open("/proc/net/netlink") as file:
            return [int(line.split()[4]) + int(line.split()[5]) for line in file.readlines()[1:]]
    except OSError:
        return []


def _num_lines(name: str) -> int:
    path = f"/proc/net/{name}"
    if not os.path.exists(path):
        return 0
    with open(path, "rb") as file:
        return max(0, file.read().count(b"\n") - 1)
