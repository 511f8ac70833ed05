"""Finds and checks the checkpoints that `--save` writes, one folder each, by their manifests.

    <save>/step_0000007/manifest.json    rollout, run, number of pushes; checksums of all files

A folder that ends in .tmp was interrupted, one that ends in .aside was replaced; neither is ever read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from slime.utils.files.checksums import FileRecord, checksum_of, find_damage

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # 1 had no checksums
MANIFEST, TRAINER = "manifest.json", "trainer"
_STEP = re.compile(r"step_(\d{7,})")
_NAMED = 6  # files of a damaged checkpoint that a message lists


class DamagedCheckpoint(ValueError):
    """A checkpoint differs from what was written; the message names file and reason."""


class NewerCheckpoint(ValueError):
    """A later version of slime wrote the checkpoint."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint. `files` None: it was written before checksums were kept.

    `inputs`: digests of the files that define the run. None: written before they were kept.
    """

    rollout_id: int
    run_id: str
    num_pushes: int
    files: Mapping[str, FileRecord] | None = field(default_factory=dict)
    inputs: Mapping[str, str] | None = None

    def to_json(self) -> str:
        """Return the manifest as JSON, with its own checksum."""
        files = {name: list(astuple(record)) for name, record in sorted((self.files or {}).items())}
        data = {"format_version": FORMAT_VERSION, **asdict(self), "files": files}
        data = {name: value for name, value in data.items() if value is not None}
        return json.dumps({**data, "checksum": _own_checksum(data)}, indent=1)


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def trainer(self) -> Path:
        return self.path / TRAINER


DamageOf = Callable[[StepFolder], list[str]]


def by_size(folder: StepFolder) -> list[str]:
    """Return `file: why` for each file that has another size than was written."""
    return find_damage(folder.path, folder.manifest.files or {}, read=False)


def by_content(folder: StepFolder) -> list[str]:
    return find_damage(folder.path, folder.manifest.files or {})


def step_folders(folder: str | Path) -> dict[int, Path]:
    """Return rollout id -> folder for the complete checkpoints in `folder`."""
    found = {int(m[1]): p for p in Path(folder).glob("step_*") if (m := _STEP.fullmatch(p.name))}
    return {step: path for step, path in found.items() if path.is_dir()}


def same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def step_path(folder: str | Path, rollout_id: int) -> Path:
    return Path(folder) / f"step_{rollout_id:07d}"


def read_step(path: Path) -> StepFolder:
    """Return a checkpoint with its manifest. DamagedCheckpoint, NewerCheckpoint: it cannot be read."""
    try:
        return StepFolder(path, _manifest_of(json.loads((path / MANIFEST).read_bytes()), path))
    except (DamagedCheckpoint, NewerCheckpoint):
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST}: the file is missing") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST}: not a manifest ({type(error).__name__}: {error})") from error


def find_step(
    folder: str | Path,
    step: int | None = None,
    *,
    flag: str = "--ckpt-step",
    damage_of: DamageOf = by_size,
    latest: int | None = None,
) -> StepFolder | None:
    """Return the checkpoint of rollout `step`, or the latest intact one; None: the folder has no checkpoints.

    If the latest is damaged, that is logged and the one before it is used. If `step` is damaged, the error
    suggests the one before it. Checkpoints after `latest` are known to be damaged and skipped.
    """
    there = step_folders(folder)
    steps = {number: path for number, path in there.items() if latest is None or number <= latest}
    if step is not None and step not in steps:
        found = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(f"{flag} is {step}: {folder} has checkpoints of rollouts {found}")
    damaged: list[str] = []
    for number in sorted(steps, reverse=True) if step is None else [step]:
        before = max((other for other in steps if other < number), default=None)
        offer = f", or try {flag} {before}, the one before it" if before is not None else ""
        try:
            found_step = read_step(steps[number])
            reasons = damage_of(found_step)
        except NewerCheckpoint as error:
            raise ValueError(f"{error}: resume with the version of slime that wrote it{offer}") from None
        except DamagedCheckpoint as error:
            reasons = [str(error)]
        if not reasons:
            if damaged:
                logger.warning("Resuming from the checkpoint before it: %s", found_step.path)
            return found_step
        text = f"checkpoint {steps[number]} is damaged: {listed(reasons)}"
        if step is not None:
            raise ValueError(f"{text}; restore it{offer}")
        logger.error("%s", text)
        damaged.append(text)
    if damaged:
        raise ValueError(f"{folder} holds no intact checkpoint:\n" + "\n".join(damaged))
    return None


def check_trainer_folder(folder: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Raise if the trainer's part of a checkpoint differs from what was written.

    `share` (i, n): the i-th of n processes that read it checks its part. A folder outside of a checkpoint has
    no manifest.
    """
    if folder.name != TRAINER or not (folder.parent / MANIFEST).is_file():
        return
    files = read_step(folder.parent).manifest.files or {}
    mine = sorted(name for name in files if name.startswith(f"{TRAINER}/"))[share[0] :: share[1]]
    damage = find_damage(folder.parent, {name: files[name] for name in mine})
    if damage:
        raise DamagedCheckpoint(f"checkpoint {folder.parent} is damaged: {listed(damage)}")


def listed(reasons: list[str]) -> str:
    """Join the reasons of damage for a message, which names the first few files."""
    more = f"; and {len(reasons) - _NAMED} more files" if len(reasons) > _NAMED else ""
    return "; ".join(reasons[:_NAMED]) + more


def _manifest_of(data: dict[str, Any], path: Path) -> Manifest:
    """Read a manifest; unknown keys are ignored."""
    version = data["format_version"]
    if version > FORMAT_VERSION:
        raise NewerCheckpoint(
            f"{path} has checkpoint format {version}, this version of slime reads up to {FORMAT_VERSION}"
        )
    intact = data.get("checksum") == _own_checksum({k: v for k, v in data.items() if k != "checksum"})
    if version > 1 and not intact:
        raise DamagedCheckpoint(f"{MANIFEST}: its content has changed (its checksum does not fit)")
    files = {name: FileRecord(*record) for name, record in data["files"].items()} if version > 1 else None
    return Manifest(data["rollout_id"], data["run_id"], data["num_pushes"], files, data.get("inputs"))


def _own_checksum(data: dict[str, Any]) -> str:
    return checksum_of(json.dumps(data, sort_keys=True).encode())
