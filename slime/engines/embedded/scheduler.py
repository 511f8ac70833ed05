"""Decides which sequences take part in the next forward pass, and lays their tokens out.

Running sequences each decode one token per pass; waiting ones join as soon as a slot and pages are free,
their prompts in the same pass, up to a token budget (long prompts take several passes). When pages run out
the youngest running sequence is retracted: it loses its pages and waits at the front, to be computed again
from its tokens.

A prompt that several sequences wait with is computed once. They share its full pages; those that ask for the
whole of it (*twins*: the samples of a group) join in the pass that computes its end, take the last page as a
copy, and draw their first tokens from the same logits.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slime.engines.embedded.attention import BatchPlan, DecodeGroup, PagedGroup, PrefillGroup
from slime.engines.embedded.kv_cache import BlockAllocator
from slime.engines.embedded.request_images import ImageRows
from slime.engines.embedded.sampler import Draws, SampleRows
from slime.engines.embedded.sequence import Sequence

# Below this many gathered bytes per layer, one padded decode group is cheaper than several exact ones: what
# counts on a GPU is the number of kernels.
_SPLIT_DECODE_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}


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
class Twins:
    """Samplers of a pass whose prompt another sequence computes: the last of them, in this order."""

    sequences: list[Sequence]
    logit_rows: torch.Tensor  # [N] for each sampler of the pass, its row of the logits
    source: torch.Tensor  # [R] pool rows of pages that are not full, and where their copies go
    target: torch.Tensor  # [R]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: the plan for the model, and who gets a token, in the order of the logits."""

    plan: BatchPlan
    samplers: list[Sequence]  # first those that decode, then those whose prompt ends here
    num_decoding: int
    chunks: list[Chunk]
    rows: SampleRows
    twins: Twins | None = None  # None: every sampler has logits of its own

    @property
    def sequences(self) -> list[Sequence]:
        """Everyone who takes part."""
        return list(dict.fromkeys([*self.samplers, *(chunk.sequence for chunk in self.chunks)]))


class SlotTable:
    """Facts of running sequences as arrays, one entry per slot: a pass is laid out without a Python loop."""

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


class Scheduler:
    """Queues and pages. `row_bytes`: of one token's key in one layer; decides how decode groups are split."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        max_tokens: int,  # of one sequence
        prefill_budget: int,
        row_bytes: int,
        dtype: torch.dtype,
        device: str | torch.device,
        in_grid: bool = False,  # positions have three rows
        never: tuple[int, ...] = (),  # ids that no answer may hold
        paged: bool = False,  # decoding reads keys where they lie, and not from padded copies
        admit_every: int = 1,  # passes: while others decode, newcomers wait for each other so long
    ):
        self.allocator = allocator
        self.max_running = max_running
        self.prefill_budget = prefill_budget
        self.row_bytes = row_bytes
        self.dtype = dtype  # of the keys; a mask of another type would send attention down a slow path
        self.device = torch.device(device)
        self.in_grid, self.never, self.paged = in_grid, never, paged
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission; prompts may be half computed
        self.num_retractions = 0
        self.admit_every, self._passes_since = admit_every, 0  # since somebody was admitted
        self._slots = SlotTable(max_running, allocator.blocks_for(max_tokens))
        self._free_slots = list(range(max_running))[::-1]

    # -- queues ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and give its pages back; full ones stay for reuse."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.epoch == self.allocator.epoch:
            self.allocator.keep(sequence.blocks, sequence.keys[: sequence.num_computed])
        self.allocator.drop(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.blocks, sequence.num_computed = -1, [], 0

    def forget(self, sequence: Sequence) -> None:
        """Take out a running sequence whose pass failed: nothing that it computed is reused."""
        self.running.remove(sequence)
        sequence.num_computed = 0
        self._leave(sequence)

    def retract(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._leave(sequence)
        sequence.num_retractions += 1
        self.num_retractions += 1
        self.waiting.appendleft(sequence)

    def retract_all(self) -> None:
        for sequence in reversed(self.running.copy()):
            self.retract(sequence)

    # -- one pass --------------------------------------------------------------------------------------------

    def schedule(self) -> Pass | None:
        """The next pass, or None when there is nothing to compute."""
        self._grow_running()
        self._admit()
        decoding: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []  # with the tokens that are not computed
        for sequence in self.running:  # all of them in every pass: no call for each
            missing = len(sequence.prompt) + len(sequence.output) - sequence.num_computed
            if missing == 1 and sequence.output:
                decoding.append(sequence)
            else:
                prompts.append((sequence, missing))
        chunks = self._chunks(prompts)
        if not decoding and not chunks:
            return None
        return self._lay_out(decoding, chunks, self._admit_twins(chunks))

    def _grow_running(self) -> None:
        """Give each decoding sequence the page that its newest token needs, or retract from the back."""
        size = self.allocator.block_size
        growing = [s for s in self.running if len(s.blocks) * size < len(s.prompt) + len(s.output)]
        for sequence in growing:
            while self.allocator.num_free == 0 and sequence.slot >= 0:
                self.retract(self.running[-1])
            if sequence.slot >= 0:
                block = self.allocator.take(1)[0]
                self._slots.blocks[sequence.slot, len(sequence.blocks)] = block
                sequence.blocks.append(block)

    def _admit(self) -> None:
        """Those that fit; siblings of a prompt that is being computed wait for its pages, a pass later."""
        self._passes_since += 1
        if not self.waiting or not self._free_slots:
            return
        if self.running and self._passes_since < self.admit_every:
            return
        self._passes_since = 0
        held_back: list[Sequence] = []
        try:
            self._admit_all_but(held_back)
        finally:
            self.waiting.extendleft(reversed(held_back))

    def _admit_all_but(self, held_back: list[Sequence]) -> None:
        budget = self.prefill_budget - sum(s.num_tokens - s.num_computed for s in self.running)
        begun = {self._next_page(s, s.num_computed) for s in self.running} - {None}
        leaders = {tuple(s.prompt) for s in self.running if self._may_lead(s)}
        while self.waiting and self._free_slots and budget > 0:
            sequence = self.waiting[0]
            tokens = sequence.tokens
            if leaders and self._may_follow(sequence) and tuple(tokens) in leaders:
                held_back.append(self.waiting.popleft())
                continue
            shared = self.allocator.match(sequence.keys)
            page = self._next_page(sequence, len(shared) * self.allocator.block_size)
            if page is not None and page in begun:
                held_back.append(self.waiting.popleft())
                continue
            self.allocator.hold(shared)
            missing = self.allocator.blocks_for(len(tokens)) - len(shared)
            # Leave a page for each running sequence, or the newcomer would be retracted at once.
            if missing + len(self.running) > self.allocator.num_free and (
                self.running or missing > self.allocator.num_free
            ):
                self.allocator.drop(shared)
                return
            sequence.blocks = shared + self.allocator.take(missing)
            sequence.num_computed = len(shared) * self.allocator.block_size
            sequence.epoch = self.allocator.epoch
            if not sequence.num_retractions:
                sequence.cached_tokens = sequence.num_computed
            sequence.slot = self._free_slots.pop()
            self._slots.fill(sequence)
            self.running.append(self.waiting.popleft())  # last: whatever raises above, it is in a queue
            budget -= len(tokens) - sequence.num_computed
            begun.add(page)
            if self._may_lead(sequence):
                leaders.add(tuple(tokens))

    def _may_lead(self, sequence: Sequence) -> bool:
        """Whether its twins can take what it computes: the whole prompt, under the weights of now."""
        return (
            self._may_follow(sequence)
            and sequence.num_computed < len(sequence.prompt)
            and sequence.epoch == self.allocator.epoch
        )

    def _may_follow(self, sequence: Sequence) -> bool:
        return self.allocator.reuse and not sequence.output and sequence.pictures is None

    def _admit_twins(self, chunks: list[Chunk]) -> list[tuple[Sequence, Chunk]]:
        """Those that wait with a prompt whose end is computed in this pass, beside the chunk that does so."""
        leading = {tuple(c.sequence.prompt): c for c in chunks if c.is_last and self._may_lead(c.sequence)}
        if not leading or not self.waiting:
            return []
        admitted: list[tuple[Sequence, Chunk]] = []
        for sequence in self.waiting:
            chunk = leading.get(tuple(sequence.prompt)) if self._may_follow(sequence) else None
            if chunk is not None and self._free_slots and self._take_pages_of(chunk.sequence, sequence):
                admitted.append((sequence, chunk))
        taken = {sequence for sequence, _ in admitted}
        self.waiting = deque(s for s in self.waiting if s not in taken)
        return admitted

    def _take_pages_of(self, leader: Sequence, sequence: Sequence) -> bool:
        """Share the leader's full pages and take one for the rest; False: there is none to take."""
        full = len(leader.prompt) // self.allocator.block_size
        missing = self.allocator.blocks_for(len(leader.prompt)) - full
        if missing + len(self.running) > self.allocator.num_free:
            return False
        self.allocator.hold(leader.blocks[:full])
        sequence.blocks = leader.blocks[:full] + self.allocator.take(missing)
        sequence.epoch = self.allocator.epoch
        if not sequence.num_retractions:
            sequence.cached_tokens = len(leader.prompt) - 1  # as a prompt that is found whole is counted
        sequence.slot = self._free_slots.pop()
        self._slots.fill(sequence)
        self.running.append(sequence)
        return True

    def _next_page(self, sequence: Sequence, num_computed: int) -> tuple[int, ...] | None:
        """All tokens up to the end of the page that comes next, if others could take it over."""
        size = self.allocator.block_size
        end = (num_computed // size + 1) * size
        if not self.allocator.reuse or end >= sequence.num_tokens:
            return None
        return tuple(sequence.keys[:end])

    def _chunks(self, prompts: list[tuple[Sequence, int]]) -> list[Chunk]:
        budget, chunks = self.prefill_budget, []
        for sequence, missing in prompts:
            if budget <= 0:
                break
            end = sequence.num_computed + min(missing, budget)
            chunks.append(Chunk(sequence, sequence.num_computed, end))
            budget -= end - sequence.num_computed
        # Same shapes side by side: they share one kernel call. Stable,
        # so admission order holds inside a group.
        return sorted(chunks, key=lambda c: (c.end - c.start, c.start))

    def _lay_out(
        self, decoding: list[Sequence], chunks: list[Chunk], followers: list[tuple[Sequence, Chunk]]
    ) -> Pass:
        slots = np.array([s.slot for s in decoding], np.int64)
        length = self._slots.length[slots]
        order, bounds = self._split_decode(length)
        slots, length = slots[order], length[order]
        decoding = [decoding[i] for i in order]
        size = self.allocator.block_size
        position = length - 1
        write_rows = self._slots.blocks[slots, position // size] * size + position % size
        ids, positions, rows = [self._slots.last_token[slots]], [position], [write_rows]
        groups = [self._decode_group(slots[a:b], length[a:b], a) for a, b in bounds]
        prefill = self._prefill_groups(chunks, len(decoding), ids, positions, rows)

        last, offset = [], len(decoding)
        for chunk in chunks:
            offset += chunk.end - chunk.start
            if chunk.is_last:
                last.append((chunk.sequence, offset - 1))
        samplers = decoding + [s for s, _ in last]
        logit_index = np.concatenate([np.arange(len(decoding)), np.array([i for _, i in last], np.int64)])
        plan = BatchPlan(
            token_ids=self._tensor(np.concatenate(ids))[None],
            positions=self._tensor(np.concatenate(positions))[None],
            write_rows=self._tensor(np.concatenate(rows)),
            logit_index=self._tensor(logit_index),
            decode=tuple(groups),
            prefill=tuple(prefill),
            grid=self._grid(position + self._slots.shift[slots], chunks) if self.in_grid else None,
            images=tuple(_image_rows(chunks, len(decoding))),
        )
        twins = self._twins(samplers, followers) if followers else None
        samplers = samplers + [sequence for sequence, _ in followers]
        return Pass(plan, samplers, len(decoding), chunks, self._sample_rows(samplers), twins)

    def _twins(self, samplers: list[Sequence], followers: list[tuple[Sequence, Chunk]]) -> Twins:
        row_of = {sequence: row for row, sequence in enumerate(samplers)}
        rows = [*range(len(samplers)), *(row_of[chunk.sequence] for _, chunk in followers)]
        size = self.allocator.block_size
        pages = [(c.sequence.blocks, s.blocks, len(s.prompt) % size) for s, c in followers]
        copied = [(a[-1], b[-1], count) for a, b, count in pages if count]
        source, target = (
            np.concatenate(
                [np.zeros(0, np.int64), *(np.arange(count) + size * page[which] for *page, count in copied)]
            )
            for which in (0, 1)
        )
        return Twins(
            [sequence for sequence, _ in followers],
            self._tensor(np.array(rows, np.int64)),
            self._tensor(source),
            self._tensor(target),
        )

    def _grid(self, decoding: np.ndarray, chunks: list[Chunk]) -> torch.Tensor:
        """[3, 1, T] positions of all tokens of a pass: those that decode, then the chunks."""
        parts = [np.broadcast_to(decoding, (3, len(decoding)))]
        parts += [chunk.sequence.positions(chunk.start, chunk.end) for chunk in chunks]
        return self._tensor(np.concatenate(parts, axis=1))[:, None]

    def _split_decode(self, length: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """An order of the decoding rows and the bounds of their groups; a group pads less than twofold."""
        if len(length) == 0:
            return np.arange(0), []
        padded_bytes = 0 if self.paged else len(length) * int(length.max()) * self.row_bytes
        if padded_bytes <= _SPLIT_DECODE_BYTES[self.device.type]:
            return np.arange(len(length)), [(0, len(length))]
        order = np.argsort(length, kind="stable")
        classes = np.ceil(np.log2(length[order]))
        edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(length)]
        return order, list(itertools.pairwise(edges))

    def _decode_group(self, slots: np.ndarray, length: np.ndarray, start: int) -> DecodeGroup | PagedGroup:
        num_blocks = self.allocator.blocks_for(int(length.max()))
        if self.paged:
            table = self._tensor(self._slots.blocks[slots, :num_blocks].astype(np.int32))
            return PagedGroup(start, len(slots), table, self._tensor(length.astype(np.int32)))
        blocks = self._tensor(self._slots.blocks[slots, :num_blocks].reshape(-1))
        keys = torch.arange(num_blocks * self.allocator.block_size, device=self.device)
        exists = keys[None, :] < self._tensor(length)[:, None]
        mask = torch.zeros(exists.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~exists, float("-inf")
        )
        return DecodeGroup(start, len(slots), blocks, mask[:, None, None, :])

    def _prefill_groups(
        self,
        chunks: list[Chunk],
        start: int,
        ids: list[np.ndarray],
        positions: list[np.ndarray],
        rows: list[np.ndarray],
    ) -> list[PrefillGroup]:
        """Groups of equal shape; appends tokens, positions and pool rows of the chunks to the given lists."""
        groups, size = [], self.allocator.block_size
        index = 0
        while index < len(chunks):
            first = chunks[index]
            shape = (first.end - first.start, first.start)
            members = []
            while (
                index < len(chunks)
                and (chunks[index].end - chunks[index].start, chunks[index].start) == shape
            ):
                members.append(chunks[index])
                index += 1
            all_rows = []
            for chunk in members:
                sequence = chunk.sequence
                ids.append(np.array(sequence.tokens[chunk.start : chunk.end], np.int64))
                place = np.arange(chunk.end)
                all_rows.append(self._slots.blocks[sequence.slot, place // size] * size + place % size)
                positions.append(place[chunk.start :])
                rows.append(all_rows[-1][chunk.start :])
            groups.append(self._prefill_group(members, all_rows, start))
            start += len(members) * shape[0]
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
        table = self._slots
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

    # -- after the pass --------------------------------------------------------------------------------------

    def commit(self, done: Pass, draws: Draws) -> None:
        """Record what was computed and the new token of each sampler."""
        for chunk in done.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            # Siblings that wait share these pages from the next pass on.
            if sequence.epoch == self.allocator.epoch:
                self.allocator.keep(sequence.blocks, sequence.keys[: chunk.end])
        for sequence in done.samplers[: done.num_decoding]:
            sequence.num_computed += 1
        for sequence in done.twins.sequences if done.twins is not None else ():
            sequence.num_computed = len(sequence.prompt)
        for row, ids in draws.kept.items():
            done.samplers[row].kept_ids.append(ids)
            done.samplers[row].num_kept_ids += len(ids)
        for sequence, token, log_prob in zip(done.samplers, draws.tokens, draws.log_probs, strict=True):
            sequence.output.append(token)
            sequence.log_probs.append(log_prob)  # last: readers on other threads count these
        slots = np.array([s.slot for s in done.samplers], np.int64)
        self._slots.last_token[slots] = draws.tokens
        self._slots.length[slots] += 1
