"""Reads the `config.json` of a model folder without transformers."""

import json
from pathlib import Path
from typing import Any


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Return its content; empty if there is no such file. ValueError names a damaged one."""
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
    """Return the rows of the embedding matrix, if a local config says so."""
    return _size(model, "vocab_size")


def context_of(model: str) -> int | None:
    """Return the number of positions that the model was made for, if its config says so."""
    return _size(model, "max_position_embeddings")


def _size(model: str, key: str) -> int | None:
    config = read_config(model)
    size = config.get("text_config", config).get(key, config.get(key))
    return size if isinstance(size, int) else None
