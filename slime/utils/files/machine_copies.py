"""Keeps copies of files in the memory of several machines: each has its own and its predecessor's files.

The first process of a machine does the work; all processes call these functions together. The files of a lost
machine, and damaged files, are restored from the others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from slime.utils.files.checksums import FileRecord, files_below, find_damage, record_files

_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """Place of a copy. `machines`: the machine of each rank; part of the name, because simulated machines
    share memory.

    Example: CopyPlace(Path("/dev/shm/slime-1-x-state-a"), (0, 0, 1, 1)) is /dev/shm/slime-1-x-state-a-1 for
    ranks 2 and 3, of which rank 2 acts for its machine.
    """

    folder: Path
    machines: tuple[int, ...]

    def of(self, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{self.machines[rank]}")

    @property
    def speakers(self) -> list[int]:
        """Return the first rank of each machine."""
        return [self.machines.index(machine) for machine in dict.fromkeys(self.machines)]


def make_room(place: CopyPlace, rank: int) -> None:
    """Remove an earlier copy and create an empty folder."""
    if rank in place.speakers:
        shutil.rmtree(place.of(rank), ignore_errors=True)
        place.of(rank).mkdir(parents=True)
    dist.barrier()


def spread(place: CopyPlace, rank: int) -> dict[str, FileRecord]:
    """Send the files of this machine to the next one too; return their records, once for each machine."""
    dist.barrier()  # all processes of this machine have written theirs
    speakers = place.speakers
    if rank not in speakers:
        return {}
    folder = place.of(rank)
    files = record_files(folder, files_below(folder))
    if len(speakers) > 1:
        number = speakers.index(rank)
        after, before = speakers[(number + 1) % len(speakers)], speakers[number - 1]
        for gives in (number % 2 == 0, number % 2 == 1):  # one of two neighbours sends first
            _give(folder, sorted(files), after) if gives else _take(folder, before)
    return files


def _give(folder: Path, names: list[str], rank: int) -> None:
    dist.send_object_list([names], dst=rank)
    for name in names:
        _send(folder / name, rank)


def _take(folder: Path, rank: int) -> None:
    names: list[list[str]] = [[]]
    dist.recv_object_list(names, src=rank)
    for name in names[0]:
        _receive(folder / name, rank)


def complete(place: CopyPlace, rank: int, files: Mapping[str, FileRecord]) -> list[str]:
    """Send every machine the files that it lacks; return `file: why` for files that no machine has."""
    folder, speakers = place.of(rank), place.speakers
    damaged = find_damage(folder, files) if rank in speakers else []
    every: list[list[str] | None] = [None] * len(place.machines)
    dist.all_gather_object(every, damaged)
    lacks = {speaker: {line.partition(": ")[0] for line in every[speaker] or []} for speaker in speakers}
    lost = []
    for name in sorted(files):
        holder = next((speaker for speaker in speakers if name not in lacks[speaker]), None)
        if holder is None:
            lost += [line for line in every[speakers[0]] or [] if line.startswith(f"{name}: ")]
            continue
        for speaker in speakers:
            if name in lacks[speaker]:
                if rank == holder:
                    _send(folder / name, speaker)
                elif rank == speaker:
                    _receive(folder / name, holder)
    dist.barrier()
    return lost


def _send(path: Path, rank: int) -> None:
    """Send the size, then the content in parts."""
    size = path.stat().st_size
    dist.send(torch.tensor([size]), rank)
    if size:
        content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        for part in content.split(_CHUNK_BYTES):
            dist.send(part, rank)


def _receive(path: Path, rank: int) -> None:
    """Receive a file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        left = int(size)
        while left > 0:
            chunk = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
            dist.recv(chunk, rank)
            file.write(chunk.numpy().data)
            left -= len(chunk)
    os.replace(part, path)
