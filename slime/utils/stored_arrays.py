"""Keeps large arrays of samples in files of the run folder, so that processes exchange references to them.

The process that parses a response writes its array to `RUN/arrays`, a folder that all hosts of a run share,
and the trainer rank that needs it reads it. A reference outlives its process: the record and checkpoints
contain references, so that a run that was killed resumes with the same arrays.
"""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.utils.errors import RunStopped

logger = logging.getLogger(__name__)

_FOLDER = "arrays"  # in the run folder


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A reference to an array in a file of its own.

    Example: StoredArray("/runs/math/arrays/17-5f1c0a92be", "|u1", (512, 58, 8), 3735928559)
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def is_there(self) -> bool:
        """Return whether the file exists with its full size; `load` compares the checksum, too."""
        try:
            return Path(self.path).stat().st_size == self._nbytes
        except OSError:
            return False

    @property
    def _nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def load(self) -> npt.NDArray[Any]:
        """Read the array into memory of its own. RunStopped: the file is lost or damaged."""
        try:
            data = bytearray(Path(self.path).read_bytes())
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if len(data) == self._nbytes and zlib.crc32(data) == self.checksum:
                return np.frombuffer(data, self.dtype).reshape(self.shape)
            reason = "its content has changed since it was written"
        raise RunStopped(
            f"{self.path} cannot be read: {reason}. It holds the experts that an engine chose for a sample; "
            "nothing but the run itself may write in that folder, and every host must see it. The same "
            "command resumes the run, and generates lost samples again."
        )


def store(array: npt.NDArray[Any], run_dir: str, name: str) -> StoredArray:
    """Write an array and return its reference. Integers take as few bytes as their values need."""
    array = np.ascontiguousarray(_narrow(array))
    path = Path(run_dir).absolute() / _FOLDER / f"{name}-{secrets.token_hex(5)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(array.data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunStopped(
            f"{path.parent} cannot take {array.nbytes} bytes of recorded experts "
            f"(--use-rollout-routing-replay): {error.strerror or error}. Free some disk, or choose another "
            "--run-dir; the same command resumes a run that saves."
        ) from error
    return StoredArray(str(path), array.dtype.str, array.shape, zlib.crc32(array.data))


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu" or not array.size:
        return array
    low, high = array.min(), array.max()
    kinds = (np.uint8, np.int16, np.int32)
    fitting = (kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return array.astype(next(fitting, array.dtype), copy=False)


def references_of(batch: Mapping[str, Any] | None) -> list[StoredArray]:
    """Return the references in the rows of a batch."""
    rows = [values for values in (batch or {}).values() if isinstance(values, list)]
    return [value for values in rows for value in values if isinstance(value, StoredArray)]


class KeptArrays:
    """Removes files that no sample, record or checkpoint needs any more.

    `by_rollout`: references of batches that are not covered by a checkpoint. `others`: of finished samples
    that are not in a batch yet. Whatever else is in the folder was left by a process that was killed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        by_rollout: Mapping[int, Iterable[StoredArray]],
        others: Iterable[StoredArray] = (),
    ):
        self._by_rollout = {rollout: list(arrays) for rollout, arrays in by_rollout.items()}
        self._folder = Path(run_dir).absolute() / _FOLDER
        known = {array.path for arrays in (*self._by_rollout.values(), others) for array in arrays}
        left = self._folder.iterdir() if self._folder.is_dir() else ()
        self._remove(path for path in left if str(path) not in known)

    def keep(self, rollout_id: int, arrays: Iterable[StoredArray]) -> None:
        """Keep the arrays of a rollout's batch until `forget`."""
        self._by_rollout[rollout_id] = list(arrays)

    def forget(self, up_to: int) -> None:
        """Remove the arrays of rollouts up to this one: nobody trains on them again."""
        done = [rollout for rollout in self._by_rollout if rollout <= up_to]
        self.remove(array for rollout in done for array in self._by_rollout.pop(rollout))

    def remove(self, arrays: Iterable[StoredArray]) -> None:
        self._remove(Path(array.path) for array in arrays)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path.parent != self._folder:  # of another run, whose checkpoint was loaded
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # it costs room, nothing else
                logger.warning("%s is not needed any more and cannot be removed: %s", path, error)
