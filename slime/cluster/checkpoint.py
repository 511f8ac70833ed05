"""A checkpoint is one transaction: trainer, rollout state and manifest in one folder, complete by one rename.

    <save>/step_0000007/manifest.json     format version, rollout id, weight version, run id
                        rollout.pt        cursor of the trained batch: data source, buffer, counters
                        trainer/          weights, optimizer, schedule, RNG (torch distributed checkpoint)

A folder that ends in .tmp was interrupted and is never read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slime.utils.errors import RunStopped
from slime.utils.step_folders import step_folders

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    rollout_id: int
    run_id: str
    num_pushes: int
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def trainer(self) -> Path:
        return self.path / "trainer"

    def rollout_state(self) -> dict[str, Any] | None:
        """None: the data source of that run keeps its own state."""
        return torch.load(self.path / "rollout.pt", weights_only=True)


def find_checkpoint(folder: str | Path, step: int | None = None) -> Checkpoint | None:
    """The latest complete checkpoint of a folder, or that of rollout `step`; None when there is none."""
    steps = step_folders(folder)
    if step is not None and step not in steps:
        found = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(f"--ckpt-step {step}: {folder} has checkpoints of rollouts {found}")
    if not steps:
        return None
    path = steps[step if step is not None else max(steps)]
    data = json.loads((path / "manifest.json").read_text())
    if data["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format {data['format_version']}, this version of slime reads {FORMAT_VERSION}: "
            "resume with the version that wrote it, or start from its --save-hf folder"
        )
    return Checkpoint(path, Manifest(**data))


def resolve_load(load: str | None, save: str | None, step: int | None) -> Checkpoint | None:
    """What `--load` means. An empty folder is fine only where this run saves too: then it is its first start."""
    if load is None:
        return None
    checkpoint = find_checkpoint(load, step)
    if checkpoint is None and (save is None or Path(load).resolve() != Path(save).resolve()):
        raise ValueError(
            f"--load {load} holds no complete checkpoint (step_*/manifest.json): give a folder written by --save, "
            "or the same folder as --save to start fresh and resume later"
        )
    return checkpoint


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """Everything in `step_N.tmp`, of which ranks may still write their part in the background."""

    staging: Path
    manifest: Manifest

    @property
    def rollout_id(self) -> int:
        return self.manifest.rollout_id

    def complete(self, keep_last: int | None = None) -> Checkpoint:
        """One rename, when all is written; then all but the `keep_last` newest checkpoints go (None: all stay)."""
        final = self.staging.with_suffix("")
        _sync_tree(self.staging)
        if final.exists():  # a resumed run repeats a rollout that was saved but not the newest when it was loaded
            shutil.rmtree(final)
        self.staging.rename(final)
        _sync_path(final.parent)
        if keep_last is not None:
            _remove_older(final.parent, keep_last)
        return Checkpoint(final, self.manifest)


def write_checkpoint(
    folder: str | Path,
    manifest: Manifest,
    rollout_state: dict[str, Any] | None,
    write_trainer: Callable[[Path], None],
    needed_bytes: int,
) -> Checkpoint:
    """A checkpoint that is complete when this returns."""
    return stage_checkpoint(folder, manifest, rollout_state, write_trainer, needed_bytes).complete()


def stage_checkpoint(
    folder: str | Path,
    manifest: Manifest,
    rollout_state: dict[str, Any] | None,
    write_trainer: Callable[[Path], None],
    needed_bytes: int,
) -> StagedCheckpoint:
    """Everything into `step_N.tmp`. An older interrupted attempt is removed first."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise RunStopped(f"--save {folder}: {free >> 20} MiB free, a checkpoint needs about {needed_bytes >> 20} MiB")
    staging = folder / f"step_{manifest.rollout_id:07d}.tmp"
    for leftover in folder.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    staging.mkdir()
    write_trainer(staging / "trainer")
    torch.save(rollout_state, staging / "rollout.pt")
    (staging / "manifest.json").write_text(json.dumps(asdict(manifest)))
    return StagedCheckpoint(staging, manifest)


def _remove_older(folder: Path, keep_last: int) -> None:
    """Newest is what was saved last in the run's order, the largest rollout."""
    steps = step_folders(folder)
    for step in sorted(steps)[:-keep_last]:
        # Renamed first: a folder half removed must not look complete.
        doomed = steps[step].rename(steps[step].with_name(steps[step].name + ".tmp"))
        shutil.rmtree(doomed)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
