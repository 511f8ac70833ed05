"""Reads the `config.json` of a model folder without transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Return the content of the file; empty if it does not exist. ValueError: it is damaged."""
    file = Path(folder).expanduser() / name
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); copy it again from the model.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not a model's configuration.")
    return config


def vocabulary_of(model: str) -> int | None:
    """Return the number of rows of the embedding matrix, if a local config has it."""
    return _size(model, "vocab_size")


def context_of(model: str) -> int | None:
    """Return the context length of the model, if its config has one."""
    return _size(model, "max_position_embeddings")


def _size(model: str, key: str) -> int | None:
    config = read_config(model)
    size = config.get("text_config", config).get(key, config.get(key))
    return size if isinstance(size, int) else None


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
