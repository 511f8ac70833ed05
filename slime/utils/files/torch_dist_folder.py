"""Finds the iteration to load in a Megatron checkpoint, and checks that slime can read its format.

    <folder>/latest_checkpointed_iteration.txt    `release` (converted, not trained) or a number
    <folder>/release/ or iter_0000100/            metadata.json, .metadata, common.pt, *.distcp

The format is torch_dist: every tensor is split into pieces as on the ranks that wrote it.
"""

import json
import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG, TENSORS = "metadata.json", ".metadata"  # the kind of the format; which file holds which piece
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


class UnreadFolder(ValueError):
    """The weights of a Megatron checkpoint cannot be read; the message completes "<folder> ..."."""


def is_torch_dist(path: str | Path) -> bool:
    """Return whether `path` is one iteration in that format, as `find_iteration` returns it."""
    return all((Path(path).expanduser() / name).is_file() for name in (CONFIG, TENSORS))


def is_megatron_folder(path: str | Path) -> bool:
    """Return whether `path` holds a Megatron checkpoint, or its name says that it should."""
    path = Path(path).expanduser()
    return is_torch_dist(path) or (path / TRACKER).is_file() or path.name.endswith("_torch_dist")


def is_release(iteration: str | Path) -> bool:
    """Return whether the iteration was converted from a model, so that both have the same weights."""
    return Path(iteration).name == RELEASE


def find_iteration(path: str | Path, step: int | None = None) -> Path:
    """Return one iteration of a folder: `step`, or the one that its tracker names, or the last.

    UnreadFolder: it is missing, or has another format.
    """
    folder = Path(path).expanduser()
    if is_torch_dist(folder):
        return folder
    if not folder.is_dir():
        raise UnreadFolder("is not there")
    chosen = folder / (_latest(folder) if step is None else f"iter_{step:07d}")
    if not chosen.is_dir():
        raise UnreadFolder(f"has no folder {chosen.name}")
    if old := next(chosen.glob("mp_rank_*"), None):
        raise UnreadFolder(f"is in Megatron's older format ({chosen.name}/{old.name}), not in torch_dist")
    if not (chosen / CONFIG).is_file():
        raise UnreadFolder(f"has no {chosen.name}/{CONFIG}")
    kind = json.loads((chosen / CONFIG).read_text())["sharded_backend"]
    if kind != "torch_dist":
        raise UnreadFolder(f"is in the format {kind}, not in torch_dist")
    if not (chosen / TENSORS).is_file():
        raise UnreadFolder(f"has no {chosen.name}/{TENSORS}: it was not written to its end")
    return chosen


def was_trained(path: str | Path) -> bool:
    """Return whether a folder holds trained weights, and not just a converted model."""
    folder = Path(path).expanduser()
    return not is_release(folder if is_torch_dist(folder) else _latest(folder))


def _latest(folder: Path) -> str:
    if (folder / TRACKER).is_file():
        said = (folder / TRACKER).read_text(errors="replace").strip()
        return f"iter_{int(said):07d}" if said.isdecimal() else RELEASE
    numbered = sorted(p.name for p in folder.glob("iter_*") if _ITERATION.fullmatch(p.name))
    return numbered[-1] if numbered and not (folder / RELEASE).is_dir() else RELEASE
