"""Takes sizes and checksums of files when they are written, and compares them before they are trusted.

Several threads read one file each, in blocks; the CRC-32 values of its blocks are combined into one. CRC-32
is the fastest checksum of the standard library by a factor of three and finds every flipped bit; it is no
protection against tampering.
"""

import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slime.utils.machine.cores import num_cores

BLOCK_BYTES = 1 << 24
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a file when it was written. Example, of the text `hello`: (5, "3610a686")."""

    num_bytes: int
    checksum: str  # eight hexadecimal digits


def record_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Return size and checksum of each named file of a folder; `sync`: flush them to the disk first."""
    names = sorted(names)
    if sync:
        for name in names:
            sync_path(folder / name)
    with _threads() as pool:
        checksums = pool.map(lambda name: _checksum(folder / name), names)
        return {
            name: FileRecord((folder / name).stat().st_size, checksum)
            for name, checksum in zip(names, checksums, strict=True)
        }


def find_damage(folder: Path, files: Mapping[str, FileRecord], *, read: bool = True) -> list[str]:
    """Return `name: why` for each file that differs from its record. Without `read`: compare sizes only."""

    def damage(name: str) -> str | None:
        record = files[name]
        try:
            if (size := (folder / name).stat().st_size) != record.num_bytes:
                return f"{size} bytes instead of {record.num_bytes}"
            if read and (found := _checksum(folder / name)) != record.checksum:
                return f"its content has changed (checksum {found} instead of {record.checksum})"
        except FileNotFoundError:
            return "the file is missing"
        except OSError as error:
            return f"it cannot be read ({error.strerror})"
        return None

    with _threads() as pool:
        names = sorted(files)
        return [f"{name}: {why}" for name, why in zip(names, pool.map(damage, names), strict=True) if why]


def files_below(folder: Path) -> list[str]:
    """Return all files below a folder, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def checksum_of(data: bytes) -> str:
    """Return the checksum that `record_files` has for a file that holds `data`."""
    return _combined(data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))


def sync_path(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, num_cores()), thread_name_prefix="checksums")


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return _combined(iter(lambda: file.read(BLOCK_BYTES), b""))


def _combined(blocks: Iterable[bytes]) -> str:
    """Return the CRC of a single block; of several the CRC of their CRCs, so that none can move unseen."""
    crcs = [zlib.crc32(block) for block in blocks]
    if len(crcs) == 1:
        return f"{crcs[0]:08x}"
    return f"{zlib.crc32(b''.join(crc.to_bytes(4, 'little') for crc in crcs)):08x}"
