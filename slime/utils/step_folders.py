"""The folders that `--save` fills, one complete checkpoint each: step_0000007. One that ends in .tmp was interrupted."""

import re
from pathlib import Path

_STEP = re.compile(r"step_(\d{7})")


def step_folders(folder: str | Path) -> dict[int, Path]:
    """Rollout id -> its checkpoint, for the complete checkpoints in `folder`."""
    return {int(m[1]): p for p in Path(folder).glob("step_*") if (m := _STEP.fullmatch(p.name))}
