"""Samples of one prompt share its tokens: a packed stream in which each prompt stands once.

    documents  [P A1] [P A2] [Q B1]        ->  stream  [P] [A1] [A2] [Q B1]

What a layer computes for a prompt's tokens depends on the prompt alone, so it is computed once, forward and
backward. Attention alone looks further: a token of A2 attends to P and to A2. The gradients of the samples
meet in the prompt's keys and values. Results equal those of the whole documents to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.attention_variants import PLAIN, Variant
from slime.algorithms.nucleus import Nucleus
from slime.backends.attention import prompt_operator
from slime.backends.attention.packed_documents import PackedDocuments, packed_attention, varlen_for
from slime.backends.attention.prompt_parts import LONGEST, PartBatches
from slime.backends.base import MicroBatch

# Sharing costs attention a gather of keys and, on a GPU, its fastest kernels: it must save some tokens.
_PAYS_FROM = 1 / 8
_SAVED_OF_PART = 16


@dataclass(frozen=True, slots=True)
class PromptTree:
    """Which tokens of a stream with shared prompts see each other."""

    whole: PackedDocuments  # the documents, each with its prompt
    expand: Tensor  # [sum of lengths] for each token of the documents its place in the stream
    own: Tensor  # [T] for each token of the stream its place in the documents
    # Parts of the stream, and of the keys that each part attends to.
    cu_query: Tensor  # [parts + 1] int32
    cu_key: Tensor  # [parts + 1] int32
    keys: Tensor  # [sum of keys] places in the stream
    # The same the other way round: by token of the stream the places in `keys` where it stands.
    readers: Tensor  # [sum of keys] int32
    reader_ends: Tensor  # [T + 1] int32
    longest: Tensor  # [] int64, on the host: of the longest part with its prompt
    bound: int  # at least that; a power of two
    parts: PartBatches = field(default_factory=PartBatches)

    @property
    def _saves_queries(self) -> bool:
        """Whether attending by part saves so many tokens of each that laying parts out pays."""
        saved = len(self.expand) - len(self.own)
        return self.bound <= LONGEST and saved >= _SAVED_OF_PART * (len(self.cu_query) - 1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """[T, H, D]; a part's last token sees all keys of the part, the one before it one less, and so on."""
        if (kernel := varlen_for(query, variant)) is not None:
            if variant is PLAIN and value.shape[-1] == query.shape[-1]:
                layout = (self.keys, self.readers, self.reader_ends, self.cu_query, self.cu_key, self.longest)
                chosen = query.shape[-1] ** -0.5 if scale is None else scale
                return prompt_operator.attend(query, key, value, *layout, chosen)
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
            return kernel(
                query, key, value, self.cu_query, self.cu_key, self.bound, self.bound, scale,
                window=variant.window,
            )  # fmt: skip
        if (
            variant is PLAIN
            and query.device.type == "cpu"
            and query.dtype.itemsize >= 4
            and self._saves_queries
        ):
            chosen = query.shape[-1] ** -0.5 if scale is None else scale
            return self.parts.attend(query, key, value, self.cu_query, self.cu_key, self.keys, chosen)
        places = (self.expand, self.own)
        return packed_attention(query, key, value, self.whole, scale=scale, variant=variant, places=places)

    def to(self, device: torch.device) -> "PromptTree":
        names = ("expand", "own", "cu_query", "cu_key", "keys", "readers", "reader_ends")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, whole=self.whole.to(device), **moved)


@dataclass(frozen=True, slots=True)
class PromptShare:
    """A micro-batch whose samples share prompts, in place of its own stream; a view like a rank's share."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    documents: PromptTree
    rows: Tensor  # [R] where in the stream the logits of each response token stand
    places: Tensor  # [R] which response token that is: all of them, in order
    nucleus: Nucleus | None
    copies: Tensor  # [T] for how many samples each token stands

    @property
    def is_whole(self) -> bool:
        """Whether all response tokens of the micro-batch are here."""
        return True

    def join(self, values: Tensor, _count: int) -> Tensor:
        return values

    def to(self, device: torch.device) -> "PromptShare":
        names = ("input_ids", "position_ids", "rows", "places", "copies")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        nucleus = None if self.nucleus is None else self.nucleus.to(device)
        return replace(self, **moved, documents=self.documents.to(device), nucleus=nucleus)

    @classmethod
    def of(cls, mb: MicroBatch) -> "PromptShare | None":
        """The micro-batch, on the CPU, with each prompt once; None where that saves too little."""
        lengths = mb.documents.lengths
        if not mb.positions or len(lengths) < 2:
            return None
        prompt_sizes = [n - r for n, r in zip(lengths, mb.response_lengths, strict=True)]
        families = _same_prompts(mb.input_ids[0].numpy(), mb.documents.bounds.tolist(), prompt_sizes)
        saved = sum(prompt_sizes[family[0]] * (len(family) - 1) for family in families)
        if saved < _PAYS_FROM * sum(lengths):
            return None
        return _build(cls, mb, families, prompt_sizes)


def _same_prompts(ids: np.ndarray, starts: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Samples by prompt, in the order of their first."""
    found: dict[bytes, list[int]] = {}
    for index, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        found.setdefault(ids[start : start + size].tobytes(), []).append(index)
    return list(found.values())


def _build(
    cls: type[PromptShare], mb: MicroBatch, families: list[list[int]], prompt_sizes: list[int]
) -> PromptShare:
    lengths, starts = mb.documents.lengths, mb.documents.bounds.tolist()
    # Ranges as (start, size), which numpy fills in together: hundreds of small arrays would cost more.
    picked: list[tuple[int, int]] = []  # by part of the stream: places in the documents
    keys: list[tuple[int, int]] = []  # places in the stream: of each part, its prompt's first
    num_keys: list[int] = []  # by part
    expand: list[tuple[tuple[int, int], ...]] = [()] * len(lengths)  # by document: places in the stream
    end = 0  # of the stream so far
    for family in families:
        first, size = family[0], prompt_sizes[family[0]]
        prompt: tuple[tuple[int, int], ...] = ()
        if len(family) > 1:
            picked.append((starts[first], size))
            prompt = ((end, size),)
            keys += prompt
            num_keys.append(size)
            end += size
        for member in family:
            shared = size if prompt else 0
            own = lengths[member] - shared
            picked.append((starts[member] + shared, own))
            expand[member] = (*prompt, (end, own))
            keys += expand[member]
            num_keys.append(lengths[member])
            end += own
    places, read = _ranges(picked), _ranges(keys)
    whole = _ranges([part for parts in expand for part in parts])
    readers, reader_ends = prompt_operator.readers_of(read, end)
    longest = max(num_keys)
    documents = PromptTree(
        whole=mb.documents,
        expand=torch.from_numpy(whole),
        own=torch.from_numpy(places),
        cu_query=_bounds([size for _, size in picked]),
        cu_key=_bounds(num_keys),
        keys=torch.from_numpy(read),
        readers=readers,
        reader_ends=reader_ends,
        longest=torch.tensor(longest),
        bound=1 << (longest - 1).bit_length(),
    )
    return cls(
        input_ids=torch.from_numpy(mb.input_ids.numpy()[:, places]),
        position_ids=torch.from_numpy(mb.position_ids.numpy()[:, places]),
        documents=documents,
        rows=torch.from_numpy(whole[mb.logit_positions.numpy()]),
        places=torch.arange(len(mb.logit_positions)),
        nucleus=mb.nucleus,
        copies=torch.from_numpy(np.bincount(whole)),
    )


def _ranges(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The numbers from start to start + size for each pair, joined."""
    starts, sizes = np.array(pairs, np.int64).reshape(-1, 2).T
    ends = sizes.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + sizes, sizes)


def _bounds(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
