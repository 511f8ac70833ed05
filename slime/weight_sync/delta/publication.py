"""Format of the folder in which a trainer publishes weight versions, and its readers.

    published.json               what there is, oldest first; replaced in one rename
    full-<version>/              a checkpoint folder: safetensors files, config, tokenizer, and weights.json
    delta-<version>/             changed bytes: delta-00001.bin, ... and weights.json
    full.wanted                  left by a reader that finds no route to its version; the trainer acts

Every folder appears atomically, by a rename. weights.json lists *all* tensors of the version with their
checksums, also the unchanged ones: a reader that applies a delta verifies the whole copy.

A reader needs only the folder or plain HTTP: nothing is pickled, nothing is executed.
"""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from slime.utils.files.checksums import sync_path
from slime.utils.http_utils import with_token
from slime.wire.delta_codec import DeltaError
from slime.wire.delta_manifest import check_name

INDEX, WANTED = "published.json", "full.wanted"
_HTTP_TIMEOUT_S = 60.0
_CHUNK = 1 << 20


def version_key(version: str) -> tuple[str, int]:
    """Parse `"3f2a:7"` into `("3f2a", 7)`."""
    run, _, number = version.rpartition(":")
    if not number.isdigit():
        raise ValueError(f"{version!r} is not a version of weights; they look like 3f2a:7")
    return run, int(number)


def is_at_least(held: str, wanted: str) -> bool:
    """Return whether `held` is of the same run as `wanted` and at least as new."""
    (held_run, held_number), (run, number) = version_key(held), version_key(wanted)
    return held_run == run and held_number >= number


def folder_name(kind: str, version: str) -> str:
    return f"{kind}-{version.replace(':', '-')}"


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """One published folder. `base` None: a full checkpoint; otherwise what the delta must be applied to."""

    version: str
    base: str | None
    folder: str
    nbytes: int  # of its files


@dataclass(frozen=True, slots=True)
class Index:
    """Index of the published versions, oldest first."""

    entries: tuple[DeltaEntry, ...] = ()

    @property
    def latest(self) -> str | None:
        return self.entries[-1].version if self.entries else None

    def to_json(self) -> str:
        return json.dumps({"entries": [asdict(entry) for entry in self.entries]}, indent=1)

    @classmethod
    def from_json(cls, text: bytes | str) -> Index:
        try:
            entries = tuple(DeltaEntry(**row) for row in json.loads(text)["entries"])
        except (ValueError, KeyError, TypeError) as error:
            raise DeltaError(f"{INDEX} is damaged ({type(error).__name__}: {error})") from error
        for entry in entries:
            check_name(entry.folder)
        return cls(entries)


# ---- durable writes ----------------------------------------------------------------------------------------


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    sync_path(beside)
    beside.rename(path)
    sync_path(path.parent)


# ---- readers -----------------------------------------------------------------------------------------------


class DeltaSource(Protocol):
    """Source of published weights. It raises FileNotFoundError for a version that is absent or removed."""

    def read(self, folder: str, file: str) -> bytes: ...

    def path_of(self, folder: str, file: str, nbytes: int, scratch: Path) -> Path:
        """Return the path of a file that can be opened here; it may be fetched into `scratch`."""
        ...

    def want_full(self) -> None:
        """Ask the trainer for a full copy of its newest version."""
        ...


def open_source(where: str) -> DeltaSource:
    """Open a folder, or http://host:port of a publisher."""
    return HttpSource(where) if where.startswith(("http://", "https://")) else FolderSource(Path(where))


def read_index(source: DeltaSource) -> Index:
    """Read the index; it is empty if nothing is published yet."""
    try:
        return Index.from_json(source.read("", INDEX))
    except FileNotFoundError:
        return Index()


class FolderSource:
    """A folder that the trainer writes and this machine sees."""

    def __init__(self, root: Path):
        self._root = root

    def read(self, folder: str, file: str) -> bytes:
        return (self._root / folder / file).read_bytes()

    def path_of(self, folder: str, file: str, nbytes: int, scratch: Path) -> Path:
        path = self._root / folder / file
        _check_size(path, nbytes)
        return path

    def want_full(self) -> None:
        (self._root / WANTED).touch()

    def __str__(self) -> str:
        return str(self._root)


class HttpSource:
    """A publisher on another machine (`slime weight-publisher`)."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")

    def read(self, folder: str, file: str) -> bytes:
        with self._open(folder, file) as response:
            return bytes(response.read())

    def path_of(self, folder: str, file: str, nbytes: int, scratch: Path) -> Path:
        target = scratch / f"{folder}.{file}"
        with self._open(folder, file) as response, open(target, "wb") as out:
            shutil.copyfileobj(response, out, _CHUNK)
        _check_size(target, nbytes)  # a connection that ends early ends the file, too
        return target

    def want_full(self) -> None:
        with self._open("", "want_full", data=b"{}"):
            pass

    def _open(self, folder: str, file: str, data: bytes | None = None) -> Any:
        url = "/".join(part for part in (self._url, folder, file) if part)
        request = urllib.request.Request(url, data=data, headers=with_token(url, None))
        try:
            return urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise FileNotFoundError(f"{url} is not published") from error
            raise

    def __str__(self) -> str:
        return self._url


def _check_size(path: Path, nbytes: int) -> None:
    held = path.stat().st_size
    if held != nbytes:
        raise DeltaError(f"{path.name} has {held} bytes, and {nbytes} were published")
