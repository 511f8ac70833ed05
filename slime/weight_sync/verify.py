"""Verifies that engines hold the pushed weights: cheap checks after every push, checksums periodically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slime.wire.control import EngineControl


async def reload_and_compare(control: EngineControl, folder: Path, version: str) -> list[str]:
    """Return names of the engine's tensors that change when it loads the same version from a checkpoint.

    For engines that fuse weights, whose tensors only they know: their own loader of files is the reference,
    and their checksums show whether the push gave the same result.
    """
    pushed = await control.checksums()
    await control.update_from_disk(str(folder), version)
    loaded = await control.checksums()
    return differing(pushed, loaded)


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return names whose values differ, or that only one side has."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
