"""Bin packing on plain numbers: first-fit under a cap, and Karmarkar-Karp balance over a number of bins."""

import heapq
import itertools
from collections.abc import Sequence

Partition = list[tuple[float, list[int]]]  # the cost and the members of each bin


def pack_first_fit(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Pack indices of `sizes` into bins of total <= cap, largest first; a size above the cap gets its own
    bin.

    Example: pack_first_fit([5, 4, 3, 2], cap=7) -> [[0, 3], [1, 2]].
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        slot = next((b for b, free in enumerate(room) if free >= sizes[index]), None)
        if slot is None:
            bins.append([index])
            room.append(cap - sizes[index])
        else:
            bins[slot].append(index)
            room[slot] -= sizes[index]
    return [sorted(members) for members in bins]


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Partition all indices into `num_bins` sets, maybe empty, of nearly equal cost (Karmarkar-Karp).

    Repeatedly joins the two most uneven partial partitions, putting the heaviest bin of one with the lightest
    of the other; this ends far closer to even than placing the largest item into the lightest bin.
    """
    if not costs:
        return [[] for _ in range(num_bins)]
    order = itertools.count()
    heap: list[tuple[float, int, Partition]] = []
    for index, cost in enumerate(costs):
        partition: Partition = [(cost, [index])] + [(0.0, []) for _ in range(num_bins - 1)]
        heapq.heappush(heap, (-cost if num_bins > 1 else 0.0, next(order), partition))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(order), joined))
    return [sorted(members) for _, members in heap[0][2]]


def split_largest(bins: list[list[int]], sizes: Sequence[float], target: int) -> list[list[int]]:
    """Halve the largest bins that hold several items until there are `target` bins, or none can be halved."""
    bins = [list(members) for members in bins]
    while len(bins) < target:
        divisible = [members for members in bins if len(members) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda members: sum(sizes[i] for i in members))
        halves = balance([sizes[i] for i in largest], 2)
        where = bins.index(largest)
        bins[where : where + 1] = [[largest[i] for i in half] for half in halves]
    return bins
