"""Allocates pages of the KV pool, shares those of common prefixes and evicts unused ones.

A page (block) is free, held by one or more sequences, or kept for reuse: full pages of finished prompts stay,
keyed by their tokens and the page before them, until their memory is needed (least recently used first). Keys
are exact, not hashes of tokens, so two prompts can never be confused.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

_ROOT = 0  # serial of "no page before"


_Key = tuple[int, tuple[int, ...]]  # (serial of the page before, tokens)


class BlockAllocator:
    """Blocks are numbered from 1: block 0 is the padding of block tables and is never handed out."""

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True):
        self.num_blocks = num_blocks
        self.reuse = reuse  # False: nothing is kept, so that results never depend on other requests
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._holders = [0] * (num_blocks + 1)
        self._by_key: dict[_Key, int] = {}
        # The serial identifies the content of a page for the pages after it; it is never reused.
        self._cached: dict[int, tuple[_Key, int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unused, oldest first
        self._next_serial = _ROOT + 1
        self.epoch = 0  # counts flushes: content written before a flush must not be kept after it

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including idle cached ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} free"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            key, _ = self._cached.pop(block)
            del self._by_key[key]
        self._holders[block] = 1
        return block

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest run of kept blocks with which `tokens` starts; `hold` them before any `take`.

        At least one token is left over: its forward pass gives the first logits.
        """
        blocks: list[int] = []
        serial = _ROOT
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self._by_key.get((serial, tuple(tokens[start : start + self.block_size])))
            if block is None:
                break
            blocks.append(block)
            _, serial = self._cached[block]
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def keep(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Offer the full blocks of a computed sequence for reuse. The holder keeps holding them."""
        serial = _ROOT
        for index in range(len(tokens) // self.block_size if self.reuse else 0):
            block = blocks[index]
            key = (serial, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))
            known = self._by_key.get(key)
            if known is None and block not in self._cached:
                self._by_key[key] = known = block
                self._cached[block] = key, self._next_serial
                self._next_serial += 1
            if known is None:
                # After a flush this block has other content, so the following blocks cannot be chained to it.
                return
            _, serial = self._cached[known]

    def drop(self, blocks: Sequence[int]) -> None:
        """Release blocks: cached blocks become idle, the others free."""
        for block in reversed(blocks):  # deepest first, so that eviction never orphans a page's successors
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._cached:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def flush(self) -> None:
        """Forget all kept content. Blocks in use stay with their holders, but `match` finds them no more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._cached.clear()
        self.epoch += 1
