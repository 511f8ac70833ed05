"""Shared prefixes under context parallelism: the stream in which each prefix stands once, cut over ranks.

As with whole documents, queries stay where they are, and keys and values are gathered. Each part of the
stream, which is what a document adds to it, is cut into 2 x size pieces; rank r holds r and 2 x size - 1 - r.
Pieces of a part differ by a token at most, and which ones are longer goes round, so that ranks hold nearly as
many tokens; the rest is padding, which sees itself alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.attention.context_parallel import SpreadTree
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.share import Share
from slime.backends.attention.shared_prefixes import PrefixShare, PrefixTree
from slime.utils.ranges import ranges


class SpreadShare(Share):
    """One rank's part of a micro-batch whose samples share prefixes; L tokens on each rank.

    Example with 2 ranks, samples [5, 6, 7, 8] and [5, 6, 7, 9], answers of one token each: the stream is
    [5, 6, 7], rank 0 holds 5 and padding, rank 1 holds 6 and 7 and predicts both answers from its row 1.
    """

    documents: SpreadTree

    @classmethod
    def of(cls, share: PrefixShare, size: int, rank: int, group: dist.ProcessGroup) -> "SpreadShare":
        """The part of `share`, which is on the CPU."""
        cut = _Cut.of(share.documents, size)
        own = np.flatnonzero(cut.owner == rank)
        padding = cut.length - len(own)
        tree = _tree_of(share.documents, cut, rank, padding)
        rows = share.rows.numpy()
        predicted = np.flatnonzero(cut.owner[rows] == rank)
        places = share.places[predicted]
        return cls(
            input_ids=_padded(share.input_ids[:, own], padding),
            position_ids=_padded(share.position_ids[:, own], padding),
            documents=SpreadTree(tree, group),
            rows=torch.from_numpy(cut.row[rows[predicted]] - rank * cut.length),
            places=places,
            predicted=torch.from_numpy(predicted),
            which=share.which,
            count=len(rows),
            group=group,
            nucleus=None if share.nucleus is None else share.nucleus.select(places),
            copies=_padded(share.copies[own], padding),
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which rank holds which tokens of a stream of T."""

    pieces: np.ndarray  # [parts, 2 x size] tokens of each
    owner: np.ndarray  # [T] rank
    row: np.ndarray  # [T] among the tokens of all ranks behind each other
    length: int  # of every rank, with its padding

    @classmethod
    def of(cls, tree: PrefixTree, size: int) -> "_Cut":
        new = np.diff(tree.cu_query.numpy())
        base, rest = np.divmod(new, 2 * size)
        before = np.cumsum(rest) - rest  # longer pieces so far
        is_longer = (np.arange(2 * size) - before[:, None]) % (2 * size) < rest[:, None]
        pieces = base[:, None] + is_longer
        holder = np.concatenate((np.arange(size), np.arange(size)[::-1]))
        owner = np.repeat(np.tile(holder, len(new)), pieces.ravel())
        length = int(np.bincount(owner, minlength=size).max())
        row = np.empty(len(owner), np.int64)
        for rank in range(size):
            own = np.flatnonzero(owner == rank)
            row[own] = rank * length + np.arange(len(own))
        return cls(pieces, owner, row, length)


def _tree_of(tree: PrefixTree, cut: _Cut, rank: int, padding: int) -> PrefixTree:
    """This rank's pieces as parts; each sees its part's keys up to its own last token."""
    size = cut.pieces.shape[1] // 2
    mine = [rank, 2 * size - 1 - rank]
    queries = cut.pieces[:, mine].ravel()
    ends = np.cumsum(cut.pieces, axis=1)[:, mine].ravel()  # in the part
    key_starts = tree.whole.bounds.numpy()[:-1]
    known = np.diff(tree.whole.bounds.numpy()) - np.diff(tree.cu_query.numpy())
    is_there = queries > 0
    queries, lengths = queries[is_there], (np.repeat(known, 2) + ends)[is_there]
    keys = cut.row[tree.keys.numpy()[ranges(np.repeat(key_starts, 2)[is_there], lengths)]]
    if padding:
        queries, lengths = np.append(queries, padding), np.append(lengths, padding)
        end = (rank + 1) * cut.length
        keys = np.concatenate((keys, np.arange(end - padding, end)))
    return PrefixTree(
        keys=torch.from_numpy(keys),
        own=None,
        num_tokens=size * cut.length,
        whole=PackedDocuments.from_lengths(lengths.tolist()),
        cu_query=torch.from_numpy(np.concatenate(([0], np.cumsum(queries))).astype(np.int32)),
        longest=torch.tensor(int(lengths.max())),
    )


def _padded(values: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, count))
