"""Writes checkpoints atomically: trainer, rollout state and manifest in one folder, published by a rename.

    <save>/step_0000007/manifest.json   format, rollout id, weight version, run id, checksums of all files
                        rollout.msgpack    cursor of the trained batch: data source, buffer, counters
                        in_flight.msgpack  the next rollout, if it was being generated (train_async.py)
                        trainer/           weights, optimizer, schedule, RNG (torch distributed checkpoint)

A folder that ends in .tmp was interrupted; one that ends in .aside was replaced by a run that resumed from an
earlier step; neither is ever read. Each rank computes checksums of the files that it has written.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.utils import codec
from slime.utils.errors import RunStopped
from slime.utils.files.checksums import FileRecord, files_below, record_files, sync_path
from slime.utils.files.step_folders import (
    MANIFEST,
    DamageOf,
    Manifest,
    StepFolder,
    by_size,
    find_step,
    listed,
    read_step,
    same_folder,
    step_folders,
    step_path,
)
from slime.utils.files.torch_files import load_torch_file

logger = logging.getLogger(__name__)

ROLLOUT, IN_FLIGHT = "rollout.msgpack", "in_flight.msgpack"
_DRIVER_FILES = (MANIFEST, ROLLOUT, IN_FLIGHT)
_RANK = re.compile(r"(?:^|/)(?:__|rng_)(\d+)[_.][^/]*$")  # that wrote a file: __3_0.distcp, rng_3.pt


def write_state(value: Any, path: Path) -> None:
    """Write rollout state into a checkpoint. ValueError: it contains something that cannot be stored."""
    try:
        path.write_bytes(codec.encode(value))
    except codec.ForeignValue as error:
        raise ValueError(
            f"{path.name} cannot hold {error}: keep numbers, text, lists, dicts, tensors or arrays there "
            "(metadata of samples, state of a data source)."
        ) from None


def read_state(path: Path) -> Any:
    """Read what `write_state` wrote. ValueError names a file that cannot be read."""
    if not path.is_file() and path.with_suffix(".pt").is_file():  # until slime.record.convert_old is deleted
        return load_torch_file(path.with_suffix(".pt"))
    try:
        return codec.decode(path.read_bytes())
    except (OSError, codec.CodecError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def resolve_load(
    load: str | None,
    save: str | None,
    step: int | None,
    *,
    damage_of: DamageOf = by_size,
    latest: int | None = None,
) -> StepFolder | None:
    """Find the checkpoint of --load. An empty folder is fine only where this run saves, too."""
    if load is None:
        return None
    checkpoint = find_step(load, step, damage_of=damage_of, latest=latest)
    if checkpoint is None and not same_folder(load, save):
        raise ValueError(
            f"--load {load} holds no complete checkpoint (step_*/manifest.json): give a folder written by "
            "--save, or the same folder as --save to start fresh and resume later"
        )
    return checkpoint


def files_of_rank(folder: Path, rank: int, world_size: int) -> list[str]:
    """Return the files of a staged checkpoint that this rank wrote; files without a rank are the first's."""
    names = [name for name in files_below(folder) if name not in _DRIVER_FILES]
    return [name for name in names if (int(m[1]) % world_size if (m := _RANK.search(name)) else 0) == rank]


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """A checkpoint in `step_N.tmp`, to which ranks may still write in the background."""

    staging: Path
    manifest: Manifest

    @property
    def rollout_id(self) -> int:
        return self.manifest.rollout_id

    @property
    def final(self) -> Path:
        return self.staging.with_suffix("")

    def complete(self, files: Mapping[str, FileRecord], keep_last: int | None = None) -> StepFolder:
        """Rename the folder once every file of the manifest is there; keep the `keep_last` newest ones.

        Wherever it is interrupted, every folder that looks like a checkpoint is a whole one. RunStopped: a
        file that a rank recorded is not in the folder that this process sees.
        """
        own = record_files(
            self.staging, [n for n in _DRIVER_FILES if (self.staging / n).is_file()], sync=True
        )
        manifest = replace(self.manifest, files={**files, **own})
        if missing := by_size(StepFolder(self.staging, manifest)):
            raise RunStopped(
                f"--save {self.staging.parent}: the checkpoint of rollout {self.rollout_id} is incomplete "
                f"and was not kept: {listed(missing)}. A trainer rank wrote it where the driver does not see "
                "it: --save must be one folder that all hosts share."
            )
        (self.staging / MANIFEST).write_text(manifest.to_json())
        sync_path(self.staging / MANIFEST)
        for path in (*(p for p in self.staging.rglob("*") if p.is_dir()), self.staging):
            sync_path(path)
        _set_aside(self.staging.parent, self.rollout_id)
        self.staging.rename(self.final)
        sync_path(self.final.parent)
        if keep_last is not None:
            _remove_older(self.final.parent, keep_last)
        return StepFolder(self.final, manifest)


def write_checkpoint(
    folder: str | Path,
    manifest: Manifest,
    state: dict[str, Any] | None,
    write_trainer: Callable[[Path], object],
    needed_bytes: int,
) -> StepFolder:
    """Write a checkpoint from this process alone; it is complete when this returns."""
    staged = stage_checkpoint(folder, manifest, write_trainer, needed_bytes)
    write_state(state, staged.staging / ROLLOUT)
    return staged.complete(record_files(staged.staging, files_of_rank(staged.staging, 0, 1), sync=True))


def stage_checkpoint(
    folder: str | Path, manifest: Manifest, write_trainer: Callable[[Path], object], needed_bytes: int
) -> StagedCheckpoint:
    """Write the trainer's part to `step_N.tmp`, to which the caller adds the rest; remove older attempts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise RunStopped(
            f"--save {folder}: the disk is too full for the checkpoint of rollout {manifest.rollout_id}: "
            f"{free >> 20} MiB free, it needs about {needed_bytes >> 20} MiB"
        )
    discard_staged(folder)
    staging = step_path(folder, manifest.rollout_id).with_suffix(".tmp")
    staging.mkdir()
    write_trainer(staging / "trainer")
    return StagedCheckpoint(staging, manifest)


def discard_staged(folder: str | Path) -> None:
    """Remove checkpoints that were never completed."""
    for leftover in Path(folder).glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _set_aside(folder: Path, rollout_id: int) -> None:
    """Rename later checkpoints, which this run did not resume: they would be taken for its latest."""
    for step, path in step_folders(folder).items():
        if step >= rollout_id:
            names = (f"{path.name}{number}.aside" for number in ("", *(f".{n}" for n in range(2, 1000))))
            target = next(place for place in map(path.with_name, names) if not place.exists())
            logger.warning("Checkpoint %s is not of this run and was renamed to %s.", path, target.name)
            path.rename(target)


def _remove_older(folder: Path, keep_last: int) -> None:
    """Keep the newest that are whole by their sizes: a damaged one is nothing to fall back on."""
    num_whole = 0
    for _, path in sorted(step_folders(folder).items(), reverse=True):
        if num_whole == keep_last:
            # Renamed first: a folder half removed must not look complete.
            shutil.rmtree(path.rename(path.with_name(path.name + ".tmp")))
            continue
        try:
            damage = by_size(read_step(path))
        except ValueError as error:
            damage = [str(error)]
        num_whole += not damage
        if damage:
            logger.warning("Checkpoint %s is damaged (%s): --keep-last-n does not count it.", path, damage[0])
