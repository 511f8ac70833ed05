"""What a config.json says of FP8 weights: whether a folder holds them, and how that is written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def block_size_of(folder: str | Path) -> tuple[int, int] | None:
    """The blocks of an FP8 checkpoint; None: its weights are in no blocks of FP8."""
    file = Path(folder) / "config.json"
    config = (json.loads(file.read_text()).get("quantization_config") if file.is_file() else None) or {}
    block = config.get("weight_block_size")
    return (int(block[0]), int(block[1])) if block and config.get("quant_method") == "fp8" else None


def quantization_config(
    block: tuple[int, int], *, scale_fmt: str | None = None, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """The entry of that name for e4m3 weights in blocks; `kept`: linear layers that stay as they are."""
    how = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    how |= {"scale_fmt": scale_fmt} if scale_fmt else {}
    return how | ({"modules_to_not_convert": list(kept)} if kept else {})
