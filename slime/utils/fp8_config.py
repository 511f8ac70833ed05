"""Whether a checkpoint folder holds FP8 weights, from its config alone."""

import json
from pathlib import Path


def block_size_of(folder: str | Path) -> tuple[int, int] | None:
    """The blocks of an FP8 checkpoint; None: its weights are in no blocks of FP8."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    block = (config or {}).get("weight_block_size")
    return (int(block[0]), int(block[1])) if block and config.get("quant_method") == "fp8" else None
