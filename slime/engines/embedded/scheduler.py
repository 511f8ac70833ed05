"""Decides which sequences take part in the next forward pass.

Running sequences each decode one token per pass; waiting ones join as soon as a slot and pages are free,
their prompts in the same pass, up to a token budget (long prompts take several passes). When pages run out
the youngest running sequence is retracted: it loses its pages and waits at the front, to be computed again
from its tokens.

Sequences that wait with the same prompt share its full pages, even in the very pass that computes them: a
layer writes all keys before it reads any.
"""

from collections import deque

import numpy as np

from slime.engines.embedded.kv_cache import BlockAllocator
from slime.engines.embedded.pass_layout import Chunk, Pass, PassLayout
from slime.engines.embedded.sampler import Draws
from slime.engines.embedded.sequence import Sequence


class Scheduler:
    """Decides which sequences run in each pass, and allocates their KV-cache pages.

    `layout` lays out the passes of running sequences and holds their slots.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        layout: PassLayout,
        *,
        max_running: int,
        prefill_budget: int,
        admit_every: int,  # passes: while others decode, new sequences wait this long for each other
    ):
        self.allocator, self.layout, self._slots = allocator, layout, layout.slots
        self.prefill_budget = prefill_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission; prompts may be half computed
        self.num_retractions = 0
        self._admit_every, self._passes_since = admit_every, 0  # passes since the last admission
        self._free_slots = list(range(max_running))[::-1]

    # -- queues ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and release its pages; full ones stay for reuse."""
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
        """Remove a running sequence whose pass failed: nothing that it computed is reused."""
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
        """Return the next pass; None: there is nothing to compute."""
        self._grow_running()
        self._admit()
        decoding: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []  # with their tokens that are not computed
        for sequence in self.running:  # all of them in every pass: no call for each
            missing = len(sequence.prompt) + len(sequence.output) - sequence.num_computed
            if missing == 1 and sequence.output:
                decoding.append(sequence)
            else:
                prompts.append((sequence, missing))
        chunks = self._chunks(prompts)
        if not decoding and not chunks:
            return None
        return self.layout.lay_out(decoding, chunks)

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
        """Admit sequences that fit; siblings of a prompt that takes several passes wait for its pages."""
        self._passes_since += 1
        if not self.waiting or not self._free_slots:
            return
        if self.running and self._passes_since < self._admit_every:
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
        while self.waiting and self._free_slots and budget > 0:
            sequence = self.waiting[0]
            tokens = sequence.tokens
            shared = self.allocator.match(sequence.keys)
            page = self._next_page(sequence, len(shared) * self.allocator.block_size)
            if page is not None and page in begun:
                held_back.append(self.waiting.popleft())
                continue
            self.allocator.hold(shared)
            missing = self.allocator.blocks_for(len(tokens)) - len(shared)
            # Leave a page for each running sequence, or the new one would be retracted at once.
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
            if budget < 0:
                begun.add(page)
            else:  # this pass computes the whole prompt: later siblings share its pages already
                self.allocator.keep(sequence.blocks, sequence.keys)

    def _next_page(self, sequence: Sequence, num_computed: int) -> tuple[int, ...] | None:
        """Return all tokens up to the end of the next page, if other sequences could reuse that page."""
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
        # Same shapes together share one kernel call; stable, so that a group keeps the order of admission.
        return sorted(chunks, key=lambda c: (c.end - c.start, c.start))

    # -- after the pass --------------------------------------------------------------------------------------

    def commit(self, done: Pass, draws: Draws) -> None:
        """Record what was computed and the new token of each sampler."""
        for chunk in done.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            # Waiting siblings share these pages from the next pass on.
            if sequence.epoch == self.allocator.epoch:
                self.allocator.keep(sequence.blocks, sequence.keys[: chunk.end])
        for sequence in done.samplers[: done.num_decoding]:
            sequence.num_computed += 1
        for row, ids in draws.kept.items():
            done.samplers[row].kept_ids.append(ids)
            done.samplers[row].num_kept_ids += len(ids)
        for sequence, token, log_prob in zip(done.samplers, draws.tokens, draws.log_probs, strict=True):
            sequence.output.append(token)
            sequence.log_probs.append(log_prob)  # last: readers on other threads count on it
        self._slots.append(np.array([s.slot for s in done.samplers], np.int64), draws.tokens)
