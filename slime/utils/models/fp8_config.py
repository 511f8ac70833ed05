"""What a config.json says of FP8 weights: whether a folder holds them, and how that is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.models.model_config import read_config


def block_size_of(folder: str | Path) -> tuple[int, int] | None:
    """The blocks of an FP8 checkpoint; None: its weights are in no blocks of FP8."""
    how = read_config(folder).get("quantization_config")
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not how.get("weight_block_size"):
        return None
    rows, columns = how["weight_block_size"]
    return int(rows), int(columns)


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
