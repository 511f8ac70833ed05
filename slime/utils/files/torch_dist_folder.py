"""Folders of Megatron's checkpoints: which of its iterations is meant, and whether its format is one we read.

    <folder>/latest_checkpointed_iteration.txt    `release` (converted, not trained) or a number
    <folder>/release/ or iter_0000100/            metadata.json, .metadata, common.pt, *.distcp

The format is torch_dist: every tensor in pieces, as the ranks had them that wrote it.
"""

import json
import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG, TENSORS = "metadata.json", ".metadata"  # the kind of the format; which file holds which piece
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


class UnreadFolder(ValueError):
    """Why the weights of a checkpoint of Megatron's cannot be read; a clause that follows its name."""


def is_torch_dist(path: str | Path) -> bool:
    """Whether `path` is one iteration in that format, as `find_iteration` gives them."""
    return all((Path(path).expanduser() / name).is_file() for name in (CONFIG, TENSORS))


def is_megatron_folder(path: str | Path) -> bool:
    """Whether a checkpoint of Megatron's is at `path`, or its name says that one should be."""
    path = Path(path).expanduser()
    return is_torch_dist(path) or (path / TRACKER).is_file() or path.name.endswith("_torch_dist")


def is_release(iteration: str | Path) -> bool:
    """Whether it was converted, so that the model it was made from has the same weights."""
    return Path(iteration).name == RELEASE


def find_iteration(path: str | Path, step: int | None = None) -> Path:
    """The iteration of a folder that is meant: `step`, or what its tracker says, or the last that is there.

    UnreadFolder, with the reason, where it is not there or of another format.
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
    try:
        kind = json.loads((chosen / CONFIG).read_text())["sharded_backend"]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UnreadFolder(f"has a damaged {chosen.name}/{CONFIG} ({type(error).__name__})") from None
    if kind != "torch_dist":
        raise UnreadFolder(f"is in the format {kind}, not in torch_dist")
    if not (chosen / TENSORS).is_file():
        raise UnreadFolder(f"has no {chosen.name}/{TENSORS}: it was not written to its end")
    return chosen


def was_trained(path: str | Path) -> bool:
    """Whether a folder says that it holds more than a converted model, which nothing else may have."""
    folder = Path(path).expanduser()
    return not is_release(folder if is_torch_dist(folder) else _latest(folder))


def _latest(folder: Path) -> str:
    if (folder / TRACKER).is_file():
        said = (folder / TRACKER).read_text(errors="replace").strip()
        return f"iter_{int(said):07d}" if said.isdecimal() else RELEASE
    numbered = sorted(p.name for p in folder.glob("iter_*") if _ITERATION.fullmatch(p.name))
    return numbered[-1] if numbered and not (folder / RELEASE).is_dir() else RELEASE
