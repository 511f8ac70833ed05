"""The file `weights.json` of a published version: what changed, and the checksum of every tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from slime.arguments.groups.engine import CHECKSUMS, ENCODINGS
from slime.wire.delta_codec import DeltaError

MANIFEST = "weights.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a version. `checksum` covers all of its bytes in this version. `size` bytes of payload
    lie at `offset` of `file`; 0: the bytes are those of the base. In a full checkpoint the bytes are in the
    safetensors files, and `file` is empty.
    """

    name: str
    nbytes: int
    itemsize: int
    checksum: str
    file: str = ""
    offset: int = 0
    size: int = 0
    num_changed: int = 0


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """weights.json of one published folder. `files`: name -> bytes, of all other files."""

    version: str
    base: str | None
    encoding: str
    checksum: str
    files: Mapping[str, int]
    tensors: tuple[TensorRecord, ...]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "files": dict(self.files)})

    @classmethod
    def from_json(cls, text: bytes | str) -> DeltaManifest:
        try:
            data = json.loads(text)
            tensors = tuple(TensorRecord(**row) for row in data.pop("tensors"))
            made = cls(tensors=tensors, **data)
            for file in made.files:
                check_name(file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeltaError(f"{MANIFEST} is damaged ({type(error).__name__}: {error})") from error
        if made.encoding not in ENCODINGS or made.checksum not in CHECKSUMS:
            raise DeltaError(
                f"{MANIFEST} says {made.encoding!r} and {made.checksum!r}, which this version cannot read"
            )
        return made


def check_name(name: str) -> None:
    """Refuse a name that is not a plain file name: names come from other machines, and become paths here."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DeltaError(f"{name!r} is not the name of a published file or folder")
