"""Formats of prompt files, by the ending of the file's name: the rows of `--prompt-data`."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """`reader` takes a path and yields each row as a dict, with its place in the file.

    Example: `.jsonl` yields (train.jsonl, line 3) and {"input": "1+1=", "label": "2"}.
    """

    reader: str
    help: str


DATASET_FORMATS: dict[str, DatasetFormat] = {
    ".jsonl": DatasetFormat("slime.data.jsonl.read_jsonl", "one JSON object per line"),
    ".parquet": DatasetFormat("slime.data.parquet.read_parquet", "a table, read with pyarrow"),
}
ENDINGS = " or ".join(DATASET_FORMATS)  # as messages name them

_HINTS = {
    ".json": "a .json file holds one value: write one JSON object per line to a .jsonl file",
    ".csv": "write its rows as .jsonl, e.g. pandas.read_csv(...).to_json(..., orient='records', lines=True)",
    **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip"), "it is compressed: unpack it first"),
}
_HINTS[".tsv"] = _HINTS[".csv"]


def why_unreadable(path: Path) -> str | None:
    """What is wrong with a prompt file, with what to do instead; None: it can be opened. Never opens it."""
    try:
        if not path.exists():
            return f"there is no such file (working directory: {Path.cwd()})"
    except OSError as error:  # a folder on the way that may not be entered, a name that is too long
        return f"it cannot be looked at ({error.strerror})"
    if path.is_dir():
        return f"it is a folder; name a {ENDINGS} file in it"
    if not path.is_file():
        return "it is a pipe, socket or device, which is read only once; write its rows to a .jsonl file"
    if path.suffix not in DATASET_FORMATS:
        hint = _HINTS.get(path.suffix.lower(), "write one JSON object per line to a .jsonl file")
        return f"it ends in {path.suffix!r}: prompts come from {ENDINGS} files; {hint}"
    if not os.access(path, os.R_OK):
        return "this user may not read it"
    return None
