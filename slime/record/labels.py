"""Tags and a note that people give a run to find it again, in `RUN/labels.json`."""

import json
import os
from pathlib import Path
from typing import Any

from slime.utils.files.restricted import restricted

LABELS_FILE = "labels.json"
_TAGS, _OF_A_TAG, _OF_A_NOTE = 12, 40, 1000  # the most tags, and the most characters
Labels = dict[str, Any]  # {"tags": ["baseline", "paper"], "note": "the learning rate was too high"}


def read_labels(folder: Path) -> Labels:
    """Return the labels of a run; a file that is absent or damaged holds none."""
    try:
        found = json.loads((folder / LABELS_FILE).read_text(encoding="utf-8"))
        return {"tags": list(map(str, found["tags"])), "note": str(found["note"])}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {"tags": [], "note": ""}


def write_labels(folder: Path, tags: list[str], note: str) -> Labels:
    """Replace the labels of a run. ValueError: they are too long, or the folder cannot be written."""
    chosen, note = list(dict.fromkeys(filter(None, (" ".join(tag.split()) for tag in tags)))), note.strip()
    longest, file = max(map(len, chosen), default=0), folder / LABELS_FILE
    if len(chosen) > _TAGS or longest > _OF_A_TAG or len(note) > _OF_A_NOTE:
        raise ValueError(
            f"{len(chosen)} tags of up to {longest} characters and a note of {len(note)}: shorten it to "
            f"{_TAGS} tags of {_OF_A_TAG} characters and a note of {_OF_A_NOTE}."
        )
    try:
        with open(file.with_suffix(".tmp"), "w", encoding="utf-8", opener=restricted) as opened:
            json.dump({"tags": chosen, "note": note}, opened)
        os.replace(opened.name, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error}.") from error
    return read_labels(folder)
