"""Positions of tokens in families whose image tokens stand in a grid (mrope).

A text token has one position, the same in all three rows (time, height, width). An image that follows at
position s is a grid of h x w tokens: its rows of the result are s, s + row, s + column; text continues
at s + max(h, w). Example: text, an image of 1 x 2 tokens, text: time 0 1 1 3, height 0 1 1 3, width 0 1 2 3.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from slime.catalog.vision import VISION_FAMILIES
from slime.utils.media.videos import SECONDS


def grid_positions(
    tokens: Sequence[int],
    grids: Sequence[Sequence[int]],
    media_ids: Collection[int],
    merge_size: int,
    speeds: Sequence[float] = (),
) -> tuple[np.ndarray, int]:
    """Return [3, T] int64 positions of one document, and the position of the token after it.

    `merge_size`: patches of each side that make one token. The n-th run of image tokens has the n-th grid,
    and its time advances by the n-th of `speeds`, or 1, with each step; ValueError if they do not fit.
    """
    is_media = np.isin(np.asarray(tokens, np.int64), list(media_ids))
    parts: list[np.ndarray] = []
    place = position = 0
    for number, grid in enumerate(grids):
        found = np.flatnonzero(is_media[place:])
        time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
        count = time * height * width
        start = place + int(found[0]) if len(found) else len(is_media)
        if not is_media[start : start + count].all() or start + count > len(is_media):
            raise ValueError(f"image {number + 1} has {count} tokens by its grid, and the tokens have fewer")
        parts.append(_text(start - place, position))
        position += start - place
        places = np.indices((time, height, width)).reshape(3, -1)
        if speeds:  # in float32, as transformers does
            places[0] = (places[0] * np.float32(speeds[number])).astype(np.int64)
        parts.append(places + position)
        position += max(height, width)
        place = start + count
    if is_media[place:].any():
        raise ValueError(f"there are more image tokens than the {len(grids)} images have")
    parts.append(_text(len(is_media) - place, position))
    return np.concatenate(parts, axis=1).astype(np.int64), position + len(is_media) - place


def media_ids_of(config: Any) -> tuple[int, ...]:
    """Return the ids of tokens that a model replaces by features."""
    videos = (config.video_token_id,) if VISION_FAMILIES[config.model_type].videos else ()
    return (config.image_token_id, *videos)


def document_positions(
    config: Any, tokens: Sequence[int], media: Mapping[str, Any] | None
) -> tuple[np.ndarray, int]:
    """Return `grid_positions` of a document with these pictures and videos, by the rules of its family."""
    grids, speeds, vision = [], [], config.vision_config
    if media is not None:
        grids = np.asarray(media["image_grid_thw"]).tolist()
        if SECONDS in media:
            seconds = np.asarray(media[SECONDS], np.float32)
            speeds = (np.float32(vision.tokens_per_second) * seconds).tolist()
    if VISION_FAMILIES[config.model_type].steps_apart:
        grids = [[1, height, width] for time, height, width in grids for _ in range(time)]
    return grid_positions(tokens, grids, media_ids_of(config), vision.spatial_merge_size, speeds)


def _text(count: int, start: int) -> np.ndarray:
    return np.broadcast_to(np.arange(start, start + count), (3, count))
