"""Applies a published delta to the engine's own parameters, in place and verified by the trainer's checksums.

Only changed elements are written: the engine needs no copy of the model on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from slime.engines.embedded.weight_update import BadWeights, refuse_non_finite, tensor_bytes
from slime.wire.delta_codec import DeltaError, checksum_function, decode, worker_pool
from slime.wire.delta_manifest import MANIFEST, DeltaManifest, TensorRecord

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types that torch can index
Change = tuple[slice | torch.Tensor, torch.Tensor]  # places in the flat tensor, and a value for each


class DeltaUpdate:
    """The decoded delta of one published folder. Creating one reads and checks the files."""

    def __init__(self, folder: Path, base: str, version: str):
        try:
            self._manifest = DeltaManifest.from_json(_regular(folder / MANIFEST).read_bytes())
            made = self._manifest.base, self._manifest.version
            if made != (base, version):
                raise DeltaError(f"it leads from {made[0]} to {made[1]}, not from {base} to {version}")
            self._records = [record for record in self._manifest.tensors if record.size]
            if strange := {record.file for record in self._records} - self._manifest.files.keys():
                raise DeltaError(f"{min(strange)!r} is not one of its files")
            with worker_pool() as pool:
                changes = pool.map(lambda record: _read_change(folder, record), self._records)
                self._changes = dict(zip((record.name for record in self._records), changes, strict=True))
        except (OSError, DeltaError, KeyError, TypeError, ValueError) as error:
            raise BadWeights(f"the delta in {str(folder)[:1000]!r} cannot be applied: {error}") from error
        self.base, self.version = base, version

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise BadWeights unless every tensor of the version is the model's, with its number of bytes."""
        for record in self._manifest.tensors:
            own = tensors.get(record.name)
            if own is None or (own.nbytes, own.element_size()) != (record.nbytes, record.itemsize):
                has = "not there" if own is None else f"of {own.nbytes} bytes in {own.dtype}"
                raise BadWeights(
                    f"the delta is made for {record.name} of {record.nbytes} bytes, {record.itemsize} an "
                    f"element; here it is {has}"
                )

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Change the tensors, and return (tensors, bytes) of the version.

        BadWeights: a tensor's checksum is not the trainer's. The model is then a mixture, as it is when the
        copy of any other update fails.
        """
        with worker_pool() as pool:
            sums = [
                pool.submit(self._checksum, self._change(tensors[record.name], record))
                for record in self._records
            ]
            for record, found in zip(self._records, sums, strict=True):
                if found.result() != record.checksum:
                    raise BadWeights(
                        f"tensor {record.name} has another checksum than the trainer's after the delta from "
                        f"{self.base} to {self.version}"
                    )
        return len(self._manifest.tensors), sum(record.nbytes for record in self._manifest.tensors)

    @property
    def _checksum(self) -> Callable[[np.ndarray], str]:
        return checksum_function(self._manifest.checksum)

    def _change(self, tensor: torch.Tensor, record: TensorRecord) -> np.ndarray:
        """Change a tensor; return its bytes."""
        dense = tensor.contiguous()  # a part of a fused tensor may lie scattered
        flat = dense.view(-1).view(_SIGNED[record.itemsize])
        where, values = (x if isinstance(x, slice) else x.to(flat.device) for x in self._changes[record.name])
        assert isinstance(values, torch.Tensor)
        new = flat[where] ^ values if self._manifest.encoding == "xor" else values
        if tensor.is_floating_point():
            refuse_non_finite(record.name, new.view(tensor.dtype), tensor.dtype)
        flat[where] = new
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)
        return tensor_bytes(tensor).cpu().numpy()


def _regular(path: Path) -> Path:
    """Refuse a file that may block who reads it, such as a pipe."""
    if not path.is_file():
        raise DeltaError(f"{path.name} is missing, or is not a regular file")
    return path


def _read_change(folder: Path, record: TensorRecord) -> Change:
    with open(_regular(folder / record.file), "rb") as file:
        file.seek(record.offset)
        payload = file.read(record.size)
    where, values = decode(payload, record.nbytes // record.itemsize, record.itemsize)
    signed = values.view(np.uint8) if record.itemsize == 1 else values.view(f"i{record.itemsize}")
    places = where if isinstance(where, slice) else torch.from_numpy(where.view(np.int64))
    return places, torch.from_numpy(np.array(signed))  # a copy: parts of the payload are read-only
