"""The `config.json` of a model folder, read as it is, without transformers."""

import json
from pathlib import Path
from typing import Any


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Its content; empty where there is no such file. A damaged one is a ValueError that names it."""
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
    """Rows of the embedding matrix, where the configuration is here and says so."""
    return _size(model, "vocab_size")


def context_of(model: str) -> int | None:
    """Positions that the model was made for, where its configuration says so."""
    return _size(model, "max_position_embeddings")


def _size(model: str, key: str) -> int | None:
    config = read_config(model)
    size = config.get("text_config", config).get(key, config.get(key))
    return size if isinstance(size, int) else None
