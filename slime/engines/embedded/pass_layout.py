"""Lays out the tokens of one forward pass: where their keys are written and which keys each row attends to.

A decoding sequence is one row. Prompts are computed by a separate attention call, unless they are so short
that treating each token as a row is faster.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slime.engines.embedded import row_spans
from slime.engines.embedded.attention import BatchPlan, DecodeGroup, PrefillGroup
from slime.engines.embedded.request_images import ImageRows
from slime.engines.embedded.row_spans import SpanGroup
from slime.engines.embedded.sampler import SampleRows
from slime.engines.embedded.sequence import Sequence

# Below this many gathered bytes per layer, one padded decode group is cheaper than several exact ones: on a
# GPU the number of kernels decides.
_SPLIT_DECODE_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
# Below this many tokens, each token of a short prompt is a row of the decode group, the only group of the
# pass.
_PROMPTS_AS_ROWS_BYTES = {"cpu": 4 << 20, "cuda": 0}
_SPANS_SAVE = 4  # tokens of one prompt read nearly the same keys, which spans gather once


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `start..end` of a sequence to compute in this pass."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: the plan for the model, and the sequences that get a token, in order of logits."""

    plan: BatchPlan
    samplers: list[Sequence]  # first decoding sequences, then those whose prompt ends in this pass
    num_decoding: int
    chunks: list[Chunk]
    rows: SampleRows

    @property
    def sequences(self) -> list[Sequence]:
        """Return all sequences of the pass."""
        return list(dict.fromkeys([*self.samplers, *(chunk.sequence for chunk in self.chunks)]))


class SlotTable:
    """State of running sequences as arrays, one entry per slot, so that no Python loop lays out a pass."""

    def __init__(self, max_running: int, max_blocks: int):
        # tokens including the newest, whose KV is not yet written
        self.length = np.zeros(max_running, np.int64)
        self.last_token = np.zeros(max_running, np.int64)
        self.blocks = np.zeros((max_running, max_blocks), np.int64)
        self.seed = np.zeros(max_running, np.int64)
        self.temperature = np.ones(max_running, np.float64)
        self.top_p = np.ones(max_running, np.float64)
        self.top_k = np.zeros(max_running, np.int64)
        self.min_p = np.zeros(max_running, np.float64)
        self.shift = np.zeros(max_running, np.int64)  # from the place of a new token to its position

    def fill(self, sequence: Sequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self.length[slot] = sequence.num_tokens
        self.last_token[slot] = sequence.output[-1] if sequence.output else sequence.prompt[-1]
        self.blocks[slot, : len(sequence.blocks)] = sequence.blocks
        self.blocks[slot, len(sequence.blocks) :] = 0
        self.seed[slot], self.shift[slot] = sequence.seed, sequence.shift
        self.temperature[slot] = 0.0 if sampling.greedy else sampling.temperature
        self.top_p[slot], self.top_k[slot], self.min_p[slot] = sampling.top_p, sampling.top_k, sampling.min_p

    def append(self, slots: np.ndarray, tokens: list[int]) -> None:
        """Append one token to the sequence of each slot."""
        self.last_token[slots] = tokens
        self.length[slots] += 1


def _image_rows(chunks: list[Chunk], start: int) -> Iterator[ImageRows]:
    """The features that a pass needs; its chunks begin at row `start`. A chunk may hold part of an image."""
    for chunk in chunks:
        pictures = chunk.sequence.pictures
        for placed in pictures.images if pictures is not None else ():
            first, last = placed.within(chunk.start, chunk.end)
            if first < last:
                rows = placed.places[first:last] - chunk.start + start
                yield ImageRows(placed.image, first, last, rows)
        start += chunk.end - chunk.start


@dataclass(eq=False)
class PassLayout:
    """Options of laying out passes. `row_bytes`: size of a token's key in one layer; splits decode groups."""

    slots: SlotTable
    block_size: int
    row_bytes: int
    dtype: torch.dtype  # dtype of the keys; masks of another dtype would make attention slow
    device: torch.device
    in_grid: bool  # positions have three rows
    never: tuple[int, ...]  # ids that no response may contain
    paged: bool  # decoding reads keys in place, not from padded copies
    spans: bool  # rows that read the same keys gather them together

    def lay_out(self, decoding: list[Sequence], chunks: list[Chunk]) -> Pass:
        """Return the pass in which `decoding` sequences get a token and the prompt `chunks` are computed."""
        slots = np.array([s.slot for s in decoding], np.int64)
        length = self.slots.length[slots]
        order, bounds = self._split_decode(length)
        slots, length, decoding = slots[order], length[order], [decoding[i] for i in order]
        position = length - 1
        ids, positions = [self.slots.last_token[slots]], [position]
        rows = [self._pool_rows(slots, position)]
        prefill: list[PrefillGroup] = []
        if chunks and self._go_as_rows(length, chunks):
            groups = [self._as_rows(slots, chunks, ids, positions, rows)]
        else:
            groups = [self._decode_group(slots[a:b], length[a:b], a) for a, b in bounds]
            prefill = self._prefill_groups(chunks, len(slots), ids, positions, rows)

        last, offset = [], len(slots)
        for chunk in chunks:
            offset += chunk.end - chunk.start
            if chunk.is_last:
                last.append((chunk.sequence, offset - 1))
        logit_index = np.concatenate([np.arange(len(slots)), np.array([i for _, i in last], np.int64)])
        plan = BatchPlan(
            token_ids=self._tensor(np.concatenate(ids))[None],
            positions=self._tensor(np.concatenate(positions))[None],
            write_rows=self._tensor(np.concatenate(rows)),
            logit_index=self._tensor(logit_index),
            decode=tuple(groups),
            prefill=tuple(prefill),
            grid=self._grid(position + self.slots.shift[slots], chunks) if self.in_grid else None,
            images=tuple(_image_rows(chunks, len(slots))),
        )
        samplers = decoding + [s for s, _ in last]
        return Pass(plan, samplers, len(decoding), chunks, self._sample_rows(samplers))

    def _pool_rows(self, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the rows of the pool that hold the tokens at `places` of the sequences in `slots`."""
        size = self.block_size
        rows: np.ndarray = self.slots.blocks[slots, places // size] * size + places % size
        return rows

    def _go_as_rows(self, length: np.ndarray, chunks: list[Chunk]) -> bool:
        """Return whether prompts are too short for attention of their own to save time."""
        if self.paged or self.in_grid or any(chunk.sequence.pictures is not None for chunk in chunks):
            return False
        count = len(length) + sum(chunk.end - chunk.start for chunk in chunks)
        longest = max([int(length.max(initial=0)), *(chunk.end for chunk in chunks)])
        most = _PROMPTS_AS_ROWS_BYTES[self.device.type] * (_SPANS_SAVE if self.spans else 1)
        return count * longest * self.row_bytes <= most

    def _as_rows(
        self,
        slots: np.ndarray,
        chunks: list[Chunk],
        ids: list[np.ndarray],
        positions: list[np.ndarray],
        rows: list[np.ndarray],
    ) -> DecodeGroup | SpanGroup:
        """Build one group of decoding tokens and all chunk tokens: each sees the keys up to its own."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        prompts = [chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks]
        ids.append(np.array(list(itertools.chain(*prompts)), np.int64))
        positions.append(np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]))
        owners = np.repeat(np.array([chunk.sequence.slot for chunk in chunks], np.int64), counts)
        rows.append(self._pool_rows(owners, positions[-1]))
        return self._decode_group(np.concatenate((slots, owners)), np.concatenate(positions) + 1, 0)

    def _grid(self, decoding: np.ndarray, chunks: list[Chunk]) -> torch.Tensor:
        """Return [3, 1, T] positions of all tokens of a pass: decoding sequences first, then the chunks."""
        parts = [np.broadcast_to(decoding, (3, len(decoding)))]
        parts += [chunk.sequence.positions(chunk.start, chunk.end) for chunk in chunks]
        return self._tensor(np.concatenate(parts, axis=1))[:, None]

    def _split_decode(self, length: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return an order of the decoding rows and the bounds of their groups; padding is below twofold."""
        if len(length) == 0:
            return np.arange(0), []
        padded_bytes = 0 if self.paged else len(length) * int(length.max()) * self.row_bytes
        if padded_bytes <= _SPLIT_DECODE_BYTES[self.device.type]:
            return np.arange(len(length)), [(0, len(length))]
        order = np.argsort(length, kind="stable")
        classes = np.ceil(np.log2(length[order]))
        edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(length)]
        return order, list(itertools.pairwise(edges))

    def _decode_group(self, slots: np.ndarray, length: np.ndarray, start: int) -> DecodeGroup | SpanGroup:
        num_blocks = -(-int(length.max()) // self.block_size)
        pages = self.slots.blocks[slots, :num_blocks]
        if self.spans:
            group = row_spans.lay_out(start, pages, length, self.block_size)
            if group is not None:
                return group
        table, lengths = (self._tensor(array.astype(np.int32)) for array in (pages, length))
        return DecodeGroup(start, len(slots), table, lengths, in_place=self.paged)

    def _prefill_groups(
        self,
        chunks: list[Chunk],
        start: int,
        ids: list[np.ndarray],
        positions: list[np.ndarray],
        rows: list[np.ndarray],
    ) -> list[PrefillGroup]:
        """Return groups of equal shape; append tokens, positions and pool rows of the chunks to the lists."""
        groups = []
        for (num_new, _), same in itertools.groupby(
            chunks, lambda chunk: (chunk.end - chunk.start, chunk.start)
        ):
            members, all_rows = list(same), []
            for chunk in members:
                ids.append(np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.int64))
                place = np.arange(chunk.end)
                all_rows.append(self._pool_rows(np.full_like(place, chunk.sequence.slot), place))
                positions.append(place[chunk.start :])
                rows.append(all_rows[-1][chunk.start :])
            groups.append(self._prefill_group(members, all_rows, start))
            start += len(members) * num_new
        return groups

    def _prefill_group(self, members: list[Chunk], all_rows: list[np.ndarray], start: int) -> PrefillGroup:
        num_cached, num_new = members[0].start, members[0].end - members[0].start
        if num_cached == 0:
            return PrefillGroup(start, len(members), num_new, 0, None, None)
        shape = (num_new, num_cached + num_new)
        mask = torch.full(shape, float("-inf"), dtype=self.dtype, device=self.device).triu_(num_cached + 1)
        return PrefillGroup(
            start, len(members), num_new, num_cached, self._tensor(np.concatenate(all_rows)), mask
        )

    def _sample_rows(self, samplers: list[Sequence]) -> SampleRows:
        table = self.slots
        slots = np.array([s.slot for s in samplers], np.int64)
        banned = tuple(
            (row, tuple(s.stop_ids))
            for row, s in enumerate(samplers)
            if s.sampling.min_new_tokens > len(s.output) and s.stop_ids
        )
        return SampleRows(
            seeds=table.seed[slots],
            positions=table.length[slots],
            temperature=table.temperature[slots],
            top_p=table.top_p[slots],
            top_k=table.top_k[slots],
            min_p=table.min_p[slots],
            banned=banned,
            recorded=tuple(row for row, s in enumerate(samplers) if s.sampling.return_top_p_token_ids),
            never=self.never,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
