"""File operations of a local sandbox, done by a child of its first process that holds no other descriptors.

The text of this file is sent to the sandbox before `guest_agent.py`, so it uses only the standard library of
Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def file_operation(request: dict[str, Any]) -> int:
    """Read or write a file; returns 0, or the number of the error after writing its text to stderr."""
    try:
        operations = {"write": write_file, "read": read_file, "pack": pack_files, "unpack": unpack_files}
        operations[request["op"]](request)
    except OSError as error:
        os.write(2, (error.strerror or str(error)).encode())
        return error.errno or errno.EIO
    return 0


def open_regular(path: str, flags: int, mode: int = 0) -> int:
    """Open a regular file that is stored somewhere: the files of /proc and /sys are ways into processes."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if found.st_dev in [os.stat(folder).st_dev for folder in ("/proc", "/sys") if os.path.isdir(folder)]:
        raise OSError(errno.EACCES, "files of /proc and /sys are refused")
    return fd


def refuse_kernel_files(path: str) -> None:
    for resolve in (os.path.normpath, os.path.realpath):
        if resolve(path).lstrip("/").split("/")[0] in ("proc", "sys"):
            raise OSError(errno.EACCES, "files of /proc and /sys are refused")


def write_file(request: dict[str, Any]) -> None:
    refuse_kernel_files(request["path"])
    folder = os.path.dirname(request["path"])
    if folder:
        os.makedirs(folder, exist_ok=True)
    fd = open_regular(request["path"], os.O_WRONLY | os.O_CREAT, 0o644)
    os.ftruncate(fd, 0)
    while True:
        view = memoryview(os.read(0, 1 << 16))
        if not view:
            return
        while view:
            view = view[os.write(fd, view) :]


def read_file(request: dict[str, Any]) -> None:
    refuse_kernel_files(request["path"])
    fd = open_regular(request["path"], os.O_RDONLY)
    left = request["most"]
    while True:
        view = memoryview(os.read(fd, 1 << 16))
        left -= len(view)
        if not view:
            return
        if left < 0:
            raise OSError(errno.EFBIG, "it is too large")
        while view:
            view = view[os.write(1, view) :]


def own_paths() -> list[str]:
    """Return all that is on the sandbox's own root, without what is mounted there; folders come first."""
    device, found = os.lstat("/").st_dev, []
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]
        paths = [os.path.join(folder, name) for name in (*folders, *files)]
        found += [path for path in paths if os.lstat(path).st_dev == device]
    return found


def pack_files(request: dict[str, Any]) -> None:
    import tarfile  # most sandboxes are never packed

    paths = own_paths()
    if sum(os.lstat(path).st_size + 1024 for path in paths) > request["most"]:
        raise OSError(errno.EFBIG, "they are too large")
    with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|") as archive:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # a program has just removed it
                archive.add(path, recursive=False)


def unpack_files(request: dict[str, Any]) -> None:
    """Replace all that is on the sandbox's own root by what an archive holds."""
    import tarfile

    with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
        archive.extraction_filter = lambda member, path: member  # the archive of a sandbox like this one
        for path in reversed(own_paths()):
            with contextlib.suppress(OSError):  # a folder in which something is mounted
                (os.unlink if os.path.islink(path) or not os.path.isdir(path) else os.rmdir)(path)
        archive.extractall("/")
