"""Shares common prefixes of documents: the packed stream contains each prefix once.

    documents  [P A1] [P A2] [Q B1]        ->  stream  [P A1] [A2] [Q B1]

A layer's output for a token depends only on the tokens up to it, so it is computed once for all documents
with this prefix, forward and backward. Shared are the prompt of several samples, a system prompt of several
prompts, common turns of agent samples, and the first tokens of responses. A document's last token predicts
nothing and is left out. Only attention looks across parts: a token of A2 attends to P and to A2. The
gradients of all documents add up in the keys and values of the shared prefix. Results equal those of whole
documents up to rounding.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.attention_variants import PLAIN, Variant, attend_to_prefix
from slime.backends.attention import prefix_operator
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import packed_attention, takes_varlen, varlen_attention
from slime.backends.attention.prefix_operator import Readers, readers_of
from slime.backends.attention.share import Share
from slime.backends.base import MicroBatch
from slime.utils.ranges import ranges

# Sharing costs a gather of keys and, on a GPU, the fastest attention kernels, so it must save enough tokens.
_PAYS_FROM = 1 / 8


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Records which tokens of a stream with shared prefixes see each other.

    A part is what a document adds to the stream; its keys are the document up to the part's end.
    """

    keys: Tensor  # [sum of keys] places in the stream, part by part
    # [T] for each token of the stream its place in `keys`, as a query of its part; None: the queries are not
    # the whole stream, but what a rank has of it.
    own: Tensor | None
    num_tokens: int  # of the stream
    whole: PackedDocuments  # the bounds of the parts in `keys`
    cu_query: Tensor  # [parts + 1] int32, in the stream
    # [] int64, on the host: of the part with the most keys. None: parts have no keys in common, so that the
    # operator for these is not needed.
    longest: Tensor | None
    # On a GPU: by token of the stream the places in `keys` where it stands.
    readers: Readers | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant = PLAIN
    ) -> Tensor:
        """[T, H, D]; a part's last token sees all keys of the part, the one before it one less, and so on."""
        chosen = query.shape[-1] ** -0.5 if scale is None else scale
        cu_key, bound = self.whole.cu_seqlens, self.whole.bound
        if takes_varlen(query, variant):
            if self.readers is not None and variant is PLAIN and value.shape[-1] == query.shape[-1]:
                assert self.longest is not None, "readers are made where it is known"
                layout = (self.keys, *self.readers, self.cu_query, cu_key, self.longest)
                return prefix_operator.attend(query, key, value, *layout, chosen)[0]
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
            return varlen_attention(
                query, key, value, self.cu_query, cu_key, bound, bound, scale, window=variant.window
            )
        if self.own is None:
            return self._attend_by_part(query, key, value, scale, variant)
        places = (self.keys, self.own)
        return packed_attention(query, key, value, self.whole, scale=scale, variant=variant, places=places)

    def _attend_by_part(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant
    ) -> Tensor:
        results = []
        bounds = zip(pairwise(self.cu_query.tolist()), pairwise(self.whole.bounds.tolist()), strict=True)
        for (first, end), (first_key, end_key) in bounds:
            seen = self.keys[first_key:end_key]
            own = query[None, first:end]
            keys, values = (x.index_select(0, seen)[None] for x in (key, value))
            results.append(attend_to_prefix(own, keys, values, scale, variant)[0])
        return torch.cat(results)

    def to(self, device: torch.device) -> "PrefixTree":
        keys, cu_query = (x.to(device, non_blocking=True) for x in (self.keys, self.cu_query))
        own = None if self.own is None else self.own.to(device, non_blocking=True)
        operates = device.type == "cuda" and self.longest is not None
        readers = readers_of(keys, self.num_tokens) if operates else None
        return replace(
            self, keys=keys, own=own, cu_query=cu_query, whole=self.whole.to(device), readers=readers
        )


class PrefixShare(Share):
    """A micro-batch whose samples share prefixes, in place of its own stream."""

    documents: PrefixTree
    which: Tensor

    @classmethod
    def of(cls, mb: MicroBatch, *, all_tokens: bool = False) -> "PrefixShare | None":
        """Return the micro-batch, on the CPU, with each prefix once; None if that saves too little.

        `all_tokens`: also tokens that predict nothing.
        """
        if not mb.positions or len(mb.documents.lengths) < 2:
            return None
        ids, bounds = mb.input_ids[0].numpy(), mb.documents.bounds.numpy()
        trie = _Trie.of(ids, bounds)
        copies = np.bincount(trie.nodes, minlength=trie.size)
        last = trie.nodes[:0] if all_tokens else trie.nodes[bounds[1:] - 1]
        read = copies > np.bincount(last, minlength=trie.size)
        if len(ids) - len(last) - read.sum() < _PAYS_FROM * len(ids):
            return None
        return _build(cls, mb, trie, read, copies[read])


@dataclass(frozen=True, slots=True)
class _Trie:
    """Prefixes of the documents, numbered as they first come up in the order of `order`."""

    nodes: np.ndarray  # [sum of lengths] for each token of the documents: the prefix that ends with it
    order: np.ndarray  # [documents]
    known: np.ndarray  # [documents], in that order: tokens that were in the document before it
    size: int

    @classmethod
    def of(cls, ids: np.ndarray, bounds: np.ndarray) -> "_Trie":
        # Sorted documents have their longest common prefix with a neighbour.
        data, step = ids.tobytes(), ids.itemsize
        starts, ends = bounds.tolist()[:-1], bounds.tolist()[1:]
        texts = [data[step * a : step * b] for a, b in zip(starts, ends, strict=True)]
        order = sorted(range(len(texts)), key=texts.__getitem__)
        nodes, count = np.empty(len(ids), np.int32), np.arange(len(ids), dtype=np.int32)
        known, size, last = [], 0, slice(0, 0)
        for number in order:
            document = slice(starts[number], ends[number])
            same = _length_of_common(ids[last], ids[document])
            middle = document.start + same
            nodes[document.start : middle] = nodes[last.start : last.start + same]
            nodes[middle : document.stop] = count[size : size + document.stop - middle]
            size += document.stop - middle
            known.append(same)
            last = document
        return cls(nodes, np.array(order), np.array(known), size)


def _length_of_common(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _build(
    cls: type[PrefixShare], mb: MicroBatch, trie: _Trie, read: np.ndarray, copies: np.ndarray
) -> PrefixShare:
    # In numpy: small arrays cost a tenth of small tensors.
    bounds = mb.documents.bounds.numpy()
    starts, lengths = bounds[trie.order], np.diff(bounds)[trie.order]
    new = lengths - trie.known
    # A document's last token is in the stream if a longer document continues from it.
    new -= (new > 0) & ~read[trie.nodes[starts + lengths - 1]]
    parts = new > 0
    starts, known, new = starts[parts], trie.known[parts], new[parts]
    place = np.cumsum(read) - 1  # of a node in the stream
    keys = place[trie.nodes[ranges(starts, known + new)]]
    key_ends = np.cumsum(known + new)
    added = ranges(starts + known, new)  # for each token of the stream its place in the documents
    documents = PrefixTree(
        keys=torch.from_numpy(keys),
        own=torch.from_numpy(ranges(key_ends - new, new)),
        num_tokens=len(added),
        whole=PackedDocuments.from_lengths((known + new).tolist()),
        cu_query=torch.from_numpy(np.concatenate(([0], np.cumsum(new))).astype(np.int32)),
        longest=torch.tensor(int((known + new).max())),
    )
    positions = mb.logit_positions.numpy()
    places, which = _once(trie.nodes[positions + 1], trie.size, mb.nucleus is not None)
    return cls(
        input_ids=torch.from_numpy(mb.input_ids.numpy()[:, added]),
        position_ids=torch.from_numpy(mb.position_ids.numpy()[:, added]),
        documents=documents,
        rows=torch.from_numpy(place[trie.nodes[positions[places]]]),
        places=torch.from_numpy(places),
        which=torch.from_numpy(which),
        nucleus=mb.nucleus,
        copies=torch.from_numpy(copies),
    )


def _once(predicted: np.ndarray, size: int, each: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return one response token for each predicted node, and for each response token the index of its node.

    `each`: all of them, because what a token was drawn from is kept by sample.
    """
    count = np.arange(len(predicted))
    if each:
        return count, count
    first = np.full(size, -1)
    first[predicted[::-1]] = count[::-1]
    found = first >= 0
    return first[found], (np.cumsum(found) - 1)[predicted]
