"""Reads and writes what a config.json says of FP8 weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.models.model_config import read_config


def block_size_of(folder: str | Path) -> tuple[int, int] | None:
    """Return the block size of an FP8 checkpoint; None: its weights are not in FP8 blocks."""
    how = read_config(folder).get("quantization_config")
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not how.get("weight_block_size"):
        return None
    rows, columns = how["weight_block_size"]
    return int(rows), int(columns)


def quantization_config(
    block: tuple[int, int], *, scale_fmt: str | None = None, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the `quantization_config` of e4m3 weights in blocks; `kept`: layers in full precision."""
    how = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    how |= {"scale_fmt": scale_fmt} if scale_fmt else {}
    return how | ({"modules_to_not_convert": list(kept)} if kept else {})
