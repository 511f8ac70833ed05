"""Builds the root of a sandbox without bubblewrap, in its first process.

The text of this file is sent to the sandbox before `guest_agent.py`, so it uses only the standard library of
Python >= 3.8. `unshare` has made the namespaces; this code makes the mounts, leaves the old root and drops
all capabilities.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
KEPT = NOEXEC | 1024 | 2048  # flags of a mount that a remount must repeat: noexec, noatime, nodiratime
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def bind(source: str, target: str, read_only: bool = True) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, None, BIND | REC)
    if read_only:
        flags = os.statvfs(target).f_flag & KEPT
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | flags)


def build_root(settings: dict[str, Any]) -> None:
    new = "/tmp"  # any folder: the mount is seen in this namespace only
    mount(None, "/", None, REC | PRIVATE)
    size, files = settings["limits"]["disk_bytes"], settings["limits"]["num_files"] + 500
    mount("tmpfs", new, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes={files},mode=755")
    for path in settings["read_only"]:
        bind(path, new + path)
    for link, target in settings["links"]:
        os.symlink(target, new + link)
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"{new}/dev/{name}", read_only=False)
    for link, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
    ):
        os.symlink(target, f"{new}/dev/{link}")
    os.makedirs(new + "/dev/shm")
    mount("tmpfs", new + "/dev/shm", "tmpfs", NOSUID | NODEV, "size=16m,nr_inodes=1000,mode=1777")
    os.makedirs(new + "/proc")
    mount("proc", new + "/proc", "proc", NOSUID | NODEV | NOEXEC)
    with open(new + "/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # this one counts in the namespace outside: none can be made inside
    os.makedirs(new + "/old")
    os.chdir(new)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"old") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root failed")
    os.chdir("/")
    if libc.umount2(b"/old", 2) != 0:
        raise OSError(ctypes.get_errno(), "the old root cannot be left")
    os.rmdir("/old")
    give_up_rights(libc)


def give_up_rights(libc: Any) -> None:
    for capability in range(64):
        libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0)  # from the bounding set: no program gains it
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")
