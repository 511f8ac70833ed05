"""Positions of tokens in families whose image tokens stand in a grid (mrope).

A text token has one position, the same in all three rows (time, height, width). An image that follows at
position s is a grid of h x w tokens: its rows of the result are s, s + row, s + column; text continues
at s + max(h, w). Example: text, an image of 1 x 2 tokens, text: time 0 1 1 3, height 0 1 1 3, width 0 1 2 3.
"""

from collections.abc import Sequence

import numpy as np


def grid_positions(
    tokens: Sequence[int], grids: Sequence[Sequence[int]], image_token_id: int, merge_size: int
) -> tuple[np.ndarray, int]:
    """Return [3, T] int64 positions of one document, and the position of the token after it.

    `merge_size`: patches of each side that make one token. The n-th run of image tokens has the n-th grid;
    ValueError if they do not fit.
    """
    ids = np.asarray(tokens, np.int64)
    parts: list[np.ndarray] = []
    place = position = 0
    for number, grid in enumerate(grids):
        found = np.flatnonzero(ids[place:] == image_token_id)
        time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
        count = time * height * width
        start = place + int(found[0]) if len(found) else len(ids)
        if not (ids[start : start + count] == image_token_id).all() or start + count > len(ids):
            raise ValueError(f"image {number + 1} has {count} tokens by its grid, and the tokens have fewer")
        parts.append(_text(start - place, position))
        position += start - place
        parts.append(np.indices((time, height, width)).reshape(3, -1) + position)
        position += max(height, width)
        place = start + count
    if (ids[place:] == image_token_id).any():
        raise ValueError(f"there are more image tokens than the {len(grids)} images have")
    parts.append(_text(len(ids) - place, position))
    return np.concatenate(parts, axis=1).astype(np.int64), position + len(ids) - place


def _text(count: int, start: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + count), (3, count))
