"""Takes sizes and checksums of files when they are written, and compares them before they are trusted.

A file is read in blocks by several threads; the CRC-32 values of its blocks are combined into one. CRC-32 is
the fastest checksum of the standard library by a factor of three and finds every flipped bit; it is no
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
_READ_BYTES = 1 << 20
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a file when it was written: FileRecord(5, "3610a686") is a file that holds
    `hello`.
    """

    num_bytes: int
    checksum: str  # eight hexadecimal digits


def record_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Return size and checksum of each named file of a folder; `sync`: flush them to the disk first."""
    names = sorted(names)
    if sync:
        for name in names:
            sync_path(folder / name)
    sizes = {name: (folder / name).stat().st_size for name in names}
    checksums = _checksums(folder, sizes)
    for found in checksums.values():
        if isinstance(found, OSError):
            raise found
    return {name: FileRecord(size, str(checksums[name])) for name, size in sizes.items()}


def find_damage(folder: Path, files: Mapping[str, FileRecord], *, read: bool = True) -> list[str]:
    """Return `name: why` for each file that differs from its record. Without `read`: compare sizes only."""
    damage: list[str] = []
    sizes: dict[str, int] = {}
    for name, record in sorted(files.items()):
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            damage.append(f"{name}: the file is missing")
            continue
        except OSError as error:
            damage.append(f"{name}: {error.strerror}")
            continue
        if size != record.num_bytes:
            damage.append(f"{name}: {size} bytes instead of {record.num_bytes}")
        else:
            sizes[name] = size
    if not read:
        return damage
    for name, found in _checksums(folder, sizes).items():
        if isinstance(found, OSError):
            damage.append(f"{name}: it cannot be read ({found.strerror})")
        elif found != files[name].checksum:
            damage.append(
                f"{name}: its content has changed (checksum {found} instead of {files[name].checksum})"
            )
    return damage


def files_below(folder: Path) -> list[str]:
    """Return all files below a folder, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def checksum_of(data: bytes) -> str:
    """Return the checksum that `record_files` has for a file that holds `data`."""
    blocks = range(0, len(data), BLOCK_BYTES)
    return _joined([zlib.crc32(data[start : start + BLOCK_BYTES]) for start in blocks])


def sync_path(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksums(folder: Path, sizes: Mapping[str, int]) -> dict[str, str | OSError]:
    """Return the checksum of each file, or the error if it cannot be read."""
    with ThreadPoolExecutor(min(_MOST_THREADS, num_cores()), thread_name_prefix="checksums") as pool:
        blocks = {
            name: [pool.submit(_crc_of_block, folder / name, start) for start in range(0, size, BLOCK_BYTES)]
            for name, size in sizes.items()
        }
        found: dict[str, str | OSError] = {}
        for name, futures in blocks.items():
            try:
                found[name] = _joined([future.result() for future in futures])
            except OSError as error:
                found[name] = error
        return found


def _joined(blocks: list[int]) -> str:
    """Combine the CRCs of blocks: a single one stays, several get a CRC of theirs, so that none can move
    unseen.
    """
    if len(blocks) == 1:
        return f"{blocks[0]:08x}"
    return f"{zlib.crc32(b''.join(crc.to_bytes(4, 'little') for crc in blocks)):08x}"


def _crc_of_block(path: Path, start: int) -> int:
    crc, left = 0, BLOCK_BYTES
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        buffer = memoryview(bytearray(_READ_BYTES))
        while left > 0 and (count := file.readinto(buffer)):
            crc, left = zlib.crc32(buffer[:count], crc), left - count
    return crc
