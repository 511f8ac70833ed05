"""Reads and writes the common files of both trainers' checkpoints: `trainer.json` and random states."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.backends.shared.checkpoint_errors import unreadable_named
from slime.utils.machine.accelerator import gpu

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "trainer.json"


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a trainer saved `path`; else it is an HF folder or a hub id."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `trainer.json`; raise ValueError if it is missing or of another format."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} is not a trainer checkpoint: {MANIFEST} is missing.")
    with unreadable_named(file):
        manifest = json.loads(file.read_text())
        version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has checkpoint format {version}, this version reads {FORMAT_VERSION}.")
    return manifest


def check_optimizer(manifest: dict[str, Any], optimizer: str, path: Path) -> None:
    """Raise ValueError if the saved moments are missing, or belong to another optimizer."""
    if manifest["optimizer"] is None:
        raise ValueError(
            f"checkpoint {path} was saved without optimizer state: resume with --no-load-optim, or take only "
            "its weights with --finetune."
        )
    if manifest["optimizer"] != optimizer:
        raise ValueError(
            f"checkpoint {path} holds the state of --optimizer {manifest['optimizer']}, this run uses "
            f"{optimizer}: use the same, or load it with --finetune (weights only)."
        )


def random_state() -> dict[str, Any]:
    """The random generators of this rank: torch, its CUDA device, numpy and Python."""
    legacy: Any = np.random.get_state()  # a tuple, where numpy says: or a dict
    kind, keys, position, has_gauss, cached = legacy
    return {
        "torch": torch.get_rng_state(),
        "cuda": gpu.get_rng_state() if gpu.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": list(random.getstate()),
    }


def load_random_state(file: Path, rank: int) -> None:
    """Set this rank's random generators to what `random_state` returned when the file was saved."""
    if not file.is_file():
        logger.warning("Rank %d was not part of the saved run: its random state starts from the seed.", rank)
        return
    with unreadable_named(file):
        state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and gpu.is_available():
        gpu.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
