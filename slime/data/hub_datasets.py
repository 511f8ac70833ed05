"""Prompts from a data set of the Hugging Face hub, or of a folder that the package `datasets` reads."""

import difflib
import functools
from pathlib import Path
from typing import Any

from slime.catalog.datasets import HUB, hub_parts
from slime.data.prompt_sources import Place, PlacedRows


def read_hub(source: str) -> PlacedRows:
    """Yield the rows of one split, as `datasets` gives them."""
    for number, row in enumerate(_split(source), start=1):
        yield Place(source, "row", number), dict(row)


@functools.lru_cache(maxsize=8)
def _split(source: str) -> Any:
    name, config, split = hub_parts(source)
    found = _load(source, name, config)
    if not isinstance(found, dict):  # a single split, saved without the others
        if split is not None and split != str(found.split):
            raise ValueError(f"{source}: it was saved without splits; write {HUB}{name}.")
        return found
    if split is None:
        split = "train" if "train" in found else next(iter(found)) if len(found) == 1 else None
    if split not in found:
        near = difflib.get_close_matches(split or "", found, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        missing = "no split is named" if split is None else f"there is no split {split!r}"
        raise ValueError(f"{source}: {missing}; {hint}it has {', '.join(found)}: write {HUB}{name}:SPLIT.")
    return found[split]


def _load(source: str, name: str, config: str | None) -> Any:
    try:
        import datasets  # an extra: takes seconds to import
    except ImportError as error:
        raise ValueError(f"{source}: it needs the package datasets: pip install 'slime-rl[hf]'.") from error
    folder = Path(name).expanduser()
    saved = any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.exists() else name, config)
    except Exception as error:  # network, hub, files: the package has many types
        said = f"{type(error).__name__}: {error}"
        hint = "is its name right, and is it public or are you logged in (hf auth login)?"
        if "onfig" in str(error) or "BuilderConfig" in said:
            hint = f"write {HUB}{name}#CONFIGURATION:SPLIT."
        raise ValueError(f"{source}: the data set cannot be loaded ({said[:600]}); {hint}") from error
