"""Pages are shared only between equal prefixes, and every page comes back."""

import random

from slime.engines.embedded.kv_cache import BlockAllocator

TOKENS = list(range(100, 140))


def finished(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """Compute a sequence and let it go; its full blocks stay for reuse."""
    shared = allocator.match(tokens)
    allocator.hold(shared)
    blocks = shared + allocator.take(allocator.blocks_for(len(tokens)) - len(shared))
    allocator.keep(blocks, tokens)
    allocator.drop(blocks)
    return blocks


def test_an_equal_prefix_is_found_up_to_full_blocks():
    allocator = BlockAllocator(20, 4)
    blocks = finished(allocator, TOKENS[:10])
    assert allocator.match([*TOKENS[:10], 1]) == blocks[:2]
    assert allocator.match([*TOKENS[:6], 1, 2, 3]) == blocks[:1]
    assert allocator.match([1, *TOKENS[:10]]) == []


def test_at_least_one_token_is_left_to_compute():
    allocator = BlockAllocator(20, 4)
    blocks = finished(allocator, TOKENS[:8])
    assert allocator.match(TOKENS[:8]) == blocks[:1]
    assert allocator.match(TOKENS[:9]) == blocks[:2]


def test_the_same_tokens_after_another_prefix_are_not_shared():
    allocator = BlockAllocator(20, 4)
    finished(allocator, [1, 1, 1, 1, 7, 7, 7, 7])
    assert len(allocator.match([2, 2, 2, 2, 7, 7, 7, 7, 0])) == 0


def test_kept_blocks_are_evicted_oldest_first_when_memory_is_needed():
    allocator = BlockAllocator(4, 4)
    finished(allocator, [1] * 8)
    finished(allocator, [2] * 8)
    assert allocator.num_free == 4
    taken = allocator.take(2)
    assert allocator.match([2] * 9) and not allocator.match([1] * 9)
    allocator.drop(taken)
    assert allocator.num_free == 4


def test_held_blocks_are_never_evicted():
    allocator = BlockAllocator(4, 4)
    finished(allocator, [1] * 8)
    held = allocator.match([1] * 9)
    allocator.hold(held)
    assert allocator.num_free == 2
    assert not set(allocator.take(2)) & set(held)


def test_a_flush_forgets_everything_and_leaks_nothing():
    allocator = BlockAllocator(6, 4)
    finished(allocator, [1] * 8)
    held = allocator.match([1] * 9)
    allocator.hold(held)
    allocator.flush()
    assert allocator.match([1] * 9) == [] and allocator.epoch == 1
    allocator.drop(held)
    assert allocator.num_free == 6 and not allocator._cached


def test_random_use_never_hands_a_block_to_two_owners_and_never_loses_one():
    rng = random.Random(0)
    allocator = BlockAllocator(12, 2)
    live: list[tuple[list[int], list[int], list[int]]] = []  # blocks, tokens, freshly taken
    for _ in range(3000):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
        shared = allocator.match(tokens)
        allocator.hold(shared)
        missing = allocator.blocks_for(len(tokens)) - len(shared)
        if missing <= allocator.num_free:
            fresh = allocator.take(missing)
            in_use = {block for blocks, _, _ in live for block in blocks} | set(shared)
            assert not in_use & set(fresh) and 0 not in fresh
            allocator.keep(shared + fresh, tokens)
            live.append((shared + fresh, tokens, fresh))
        else:
            allocator.drop(shared)
        while live and rng.random() < 0.5:
            allocator.drop(live.pop(rng.randrange(len(live)))[0])
        if rng.random() < 0.01:
            for blocks, _, _ in live:
                allocator.drop(blocks)
            live.clear()
            allocator.flush()
        used = {block for blocks, _, _ in live for block in blocks}
        assert allocator.num_free + len(used) == 12
