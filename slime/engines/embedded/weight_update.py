"""Replaces a model's parameters from shared memory or a checkpoint folder, after verifying all of them.

Over a process group, parameters arrive and are applied bucket by bucket; the engine generates nothing until
all have arrived.

Names are those of hub checkpoints. Tensors that transformers fuses in memory, such as all experts of a layer,
are written in parts. Not covered: families whose parts are no views of the fused tensor; such an update is
refused, and nothing is applied.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from slime.utils.files.safetensors_files import model_files
from slime.utils.machine import shm
from slime.utils.models.finite import is_finite
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, dequantize_blocks
from slime.utils.models.hub_names import Part, parts_of, saved_tensors
from slime.wire.manifest import BucketManifest, WeightManifest, byte_checksum


class BadWeights(ValueError):
    """The update was refused; the model is untouched."""


class Source(Protocol):
    """Source of new tensors. `shapes` is known before any tensor is read."""

    shapes: dict[str, tuple[int, ...]]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def close(self) -> None: ...


class SharedMemorySource:
    """The tensors of a manifest. Creating one verifies every bucket's checksum."""

    def __init__(self, manifest: WeightManifest):
        self._parts = [(bucket, _open_verified(bucket)) for bucket in manifest.buckets]
        self.shapes = {entry.name: entry.shape for bucket in manifest.buckets for entry in bucket.tensors}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, segment in self._parts:
            for entry in bucket.tensors:
                yield entry.name, entry.view(segment.buffer)

    def close(self) -> None:
        for _, segment in self._parts:
            segment.close()


def _open_verified(bucket: BucketManifest) -> shm.Segment:
    try:
        segment = shm.open_segment(bucket.segment)
    except (OSError, ValueError) as error:
        raise BadWeights(f"segment {bucket.segment} cannot be opened: {error}") from error
    if segment.nbytes < bucket.nbytes:
        raise BadWeights(
            f"segment {bucket.segment} has {segment.nbytes} bytes, the manifest says {bucket.nbytes}"
        )
    found = byte_checksum(segment.buffer[: bucket.nbytes])
    if found != bucket.checksum:
        raise BadWeights(
            f"segment {bucket.segment} has checksum {found:#018x}, the manifest says "
            f"{bucket.checksum:#018x}: its bytes changed in transit"
        )
    return segment


class DiskSource:
    """The safetensors files of a checkpoint folder, read lazily."""

    def __init__(self, folder: str | Path):
        self._files = ExitStack()
        self._handles = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            files = model_files(Path(folder))
            if not files or not all(file.is_file() for file in files):  # reading a pipe would block
                raise ValueError("a .safetensors file is missing, or is not a regular file")
            for path in files:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
                self._handles.append(handle)
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (OSError, SafetensorError, ValueError) as error:
            self.close()
            raise BadWeights(f"{str(folder)[:1000]!r} cannot be read as a checkpoint: {error}") from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for handle in self._handles:
            for name in handle.keys():  # noqa: SIM118
                try:
                    yield name, handle.get_tensor(name)
                except (SafetensorError, OSError, RuntimeError, TypeError, AttributeError) as error:
                    raise BadWeights(f"tensor {name} cannot be read: {error}") from error

    def close(self) -> None:
        self._files.close()


class GroupSource:
    """The tensors of one bucket from a process group."""

    def __init__(self, named: Mapping[str, torch.Tensor]):
        self._named = named
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named.items()

    def close(self) -> None:
        """Do nothing: no resource is open."""


class DequantizedSource:
    """Dequantizes the FP8 weights of another source."""

    def __init__(self, source: Source, block: tuple[int, int]):
        self._source, self._block = source, block
        self.shapes = {name: s for name, s in source.shapes.items() if not name.endswith(SCALE_SUFFIX)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        halves: dict[str, torch.Tensor] = {}  # an FP8 weight or its factors, until the other arrives
        for name, tensor in self._source.tensors():
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight + SCALE_SUFFIX not in self._source.shapes:
                yield name, tensor
            elif weight not in halves:
                halves[weight] = tensor
            else:
                values, scale = (halves.pop(weight), tensor)[:: 1 if name != weight else -1]
                try:
                    yield weight, dequantize_blocks(values, scale, self._block, torch.float32)
                except ValueError as error:
                    raise BadWeights(f"{weight}: {error}") from error

    def close(self) -> None:
        self._source.close()


class WeightStore:
    """The parameters of one model under their hub names; tied parameters are found under each name.

    `fp8_block`: block size of FP8 weights in the checkpoint and in updates. `hub_names`: names of the
    checkpoint's tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        fp8_block: tuple[int, int] | None = None,
        hub_names: Collection[str] = frozenset(),
    ):
        self._model = model
        self._block = fp8_block
        self._hub_names = hub_names
        self._parts: dict[str, list[Part]] = {}  # cached for each in-memory tensor

    def _plain(self, source: Source) -> Source:
        return source if self._block is None else DequantizedSource(source, self._block)

    def _parameters(self) -> dict[str, torch.Tensor]:
        return self._hub_views(dict(self._model.named_parameters(remove_duplicate=False)))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters, and buffers of the checkpoint (balance of experts) that an update may omit."""
        return self._hub_views(dict(saved_tensors(self._model, tied=True))) | self._parameters()

    def _hub_views(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if new := {name: tensor for name, tensor in own.items() if name not in self._parts}:
            try:
                self._parts |= parts_of(self._model, new, self._hub_names)
            except ValueError as error:
                raise BadWeights(
                    f"{type(self._model).__name__}: {error}; use --rollout-engine sglang"
                ) from error
        # Not `data`: its changes do not raise the parameter's version, on which packed copies depend.
        return {part.name: part.of(tensor.detach()) for n, tensor in own.items() for part in self._parts[n]}

    def check(self, source: Source) -> None:
        """Raise BadWeights unless the source has every parameter, each with its shape, and nothing else."""
        self.check_part(source)
        missing = self.missing(set(self._plain(source).shapes))
        if missing:
            raise BadWeights(
                f"{len(missing)} parameters are missing from the update, the first is {missing[0]}"
            )

    def missing(self, given: set[str]) -> list[str]:
        """Return parameters that are not among the `given` names; of tied ones any name is enough."""
        places = {name: parameter.data_ptr() for name, parameter in self._parameters().items()}
        held = {place for name, place in places.items() if name in given}
        return [name for name, place in places.items() if place not in held]

    def check_part(self, source: Source) -> None:
        """Raise BadWeights unless all of the source belongs to the model, each tensor with its shape."""
        source, parameters = self._plain(source), self._tensors()
        for name, shape in source.shapes.items():
            if name not in parameters:
                raise BadWeights(
                    f"tensor {name} is not a parameter of this model ({type(self._model).__name__})"
                )
            if tuple(parameters[name].shape) != shape:
                raise BadWeights(
                    f"tensor {name} has shape {list(shape)}, the model's is {list(parameters[name].shape)}"
                )

    @torch.no_grad()
    def check_finite(self, source: Source) -> None:
        """Raise BadWeights at the first tensor of integers, or with a value not finite in the model's dtype.

        Call `check` first. It reads every tensor, which takes as long as copying them.
        """
        parameters = self._tensors()
        for name, tensor in self._plain(source).tensors():
            wanted = parameters[name].dtype
            if tensor.is_floating_point() != wanted.is_floating_point:
                raise BadWeights(
                    f"tensor {name} is of {tensor.dtype}, the model's of {wanted}: nothing is changed"
                )
            refuse_non_finite(name, tensor, wanted)

    @torch.no_grad()
    def apply(self, source: Source) -> tuple[int, int]:
        """Copy every tensor in; returns (tensors, bytes). Call `check` first: this must not fail half-way."""
        parameters, nbytes = self._tensors(), 0
        for name, tensor in self._plain(source).tensors():
            parameters[name].copy_(tensor)
            nbytes += tensor.numel() * tensor.element_size()
        return len(source.shapes), nbytes

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that can be changed in place, byte by byte."""
        if self._block is not None:
            raise BadWeights("the model came from FP8 blocks, which it no longer holds")
        return self._tensors()

    @torch.no_grad()
    def differing(self, source: Source) -> list[str]:
        """Return names whose values differ from the source's in the model's dtype, or that it lacks."""
        source, known, needed = self._plain(source), self._tensors(), self._parameters().keys()
        names, seen = [], set()
        for name, tensor in source.tensors():
            own = known.get(name)
            seen.add(None if own is None else own.data_ptr())
            if own is None or own.shape != tensor.shape or not same_bytes(own, tensor):
                names.append(name)
        return names + [name for name, p in known.items() if p.data_ptr() not in seen and name in needed]

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        return {name: byte_checksum(tensor_bytes(p)) for name, p in self._parameters().items()}


def refuse_non_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise BadWeights for values that are not finite in `dtype`, the dtype of the model."""
    if not is_finite(tensor, dtype):
        raise BadWeights(
            f"tensor {name} has values that are not finite numbers (in {dtype}): nothing is changed"
        )


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same_bytes(own: torch.Tensor, new: torch.Tensor) -> bool:
    return torch.equal(tensor_bytes(own), tensor_bytes(new.to(own.device, own.dtype)))
