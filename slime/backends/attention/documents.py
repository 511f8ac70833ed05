"""Describes the documents of a packed stream, and which of them can be computed as one batch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# A group spans lengths from n - 8 (or 7/8 n) to n, so that few padded tokens are computed.
_PAD_TOKENS = 8
_PAD_SHARE = 8
_GROUP_TOKENS = 1 << 16


def move_fields(value: T, device: torch.device) -> T:
    """Copy a dataclass, with all fields that have a method `to` moved to `device`."""
    moved: dict[str, Any] = {}
    for name in (part.name for part in fields(value)):  # type: ignore[arg-type] # a dataclass
        part = getattr(value, name)
        if isinstance(part, Tensor):
            moved[name] = part.to(device, non_blocking=True)
        elif hasattr(part, "to"):
            moved[name] = part.to(device)
    return replace(value, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Documents of similar length that are computed as one batch."""

    gather: Tensor  # [n, longest] stream positions; padding repeats a real one
    real: Tensor  # [n * longest] False: padding


@dataclass(slots=True)
class PackedDocuments:
    """Boundaries of the documents in a packed stream: `cu_seqlens` [D + 1] int32, starting at 0."""

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    # At least the longest document. A power of two, because compiled layers are specialised to its value.
    bound: int
    bounds: Tensor  # cu_seqlens as the host reads them: int64, on the CPU
    _groups: tuple[list[DocumentGroup], Tensor] | None = field(default=None, repr=False)

    @classmethod
    def from_lengths(cls, lengths: list[int] | tuple[int, ...]) -> "PackedDocuments":
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        bound = 1 << (max(lengths) - 1).bit_length()
        return cls(cu_seqlens, tuple(lengths), bound, cu_seqlens.long())

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def to(self, device: torch.device) -> "PackedDocuments":
        if self.cu_seqlens.device == device:
            return self
        return PackedDocuments(
            self.cu_seqlens.to(device, non_blocking=True), self.lengths, self.bound, self.bounds
        )

    def groups(self) -> tuple[list[DocumentGroup], Tensor]:
        """Return the document groups, and each stream position's row in their joined results; built once."""
        if self._groups is None:
            groups = _group_documents(self.lengths, self.cu_seqlens.device)
            rows = torch.cat([group.real for group in groups]).nonzero()[:, 0]
            row_of = torch.empty_like(rows)
            row_of[torch.cat([group.gather.flatten()[group.real] for group in groups])] = rows
            self._groups = groups, row_of
        return self._groups


def _group_documents(lengths: tuple[int, ...], device: torch.device) -> list[DocumentGroup]:
    starts = torch.tensor((0, *lengths)).cumsum(0)[:-1]
    sizes = torch.tensor(lengths)
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[DocumentGroup] = []
    begin = 0
    while begin < len(by_length):
        longest = lengths[by_length[begin]]
        floor = longest - max(_PAD_TOKENS, longest // _PAD_SHARE)
        limit = begin + max(1, _GROUP_TOKENS // max(longest, 1))
        end = begin + 1
        while end < min(len(by_length), limit) and lengths[by_length[end]] >= floor:
            end += 1
        members = torch.tensor(by_length[begin:end])
        column = torch.arange(longest)
        real = column < sizes[members, None]
        positions = starts[members, None] + torch.where(real, column, 0)
        groups.append(DocumentGroup(positions.to(device), real.flatten().to(device)))
        begin = end
    return groups
