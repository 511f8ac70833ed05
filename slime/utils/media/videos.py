"""Makes a model's input of a video from its frames, which the processor encodes as pictures.

The part of a processor for videos needs torchvision, which resizes otherwise than PIL does; frames go through
the part for pictures instead, with its limits on pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.utils.media.pictures import NotAnImage, Video

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = "second_per_grid_ts"  # of a processor: from one step of a video to the next; 0: a picture
# Class of processor -> whether a prompt has the time of each step, in text, before the tokens of the step.
_TIMED = {"Qwen2_5_VLProcessor": False, "Qwen3VLProcessor": True}
_CHANNELS = 3


def reads_videos(processor: Any) -> bool:
    return type(processor).__name__ in _TIMED


def encode_video(
    processor: Any, video: Video, frames: list[dict[str, Tensor]]
) -> tuple[list[int], dict[str, Tensor]]:
    """Return the ids and tensors of a video, given those of each frame as a picture.

    A model reads steps of several frames, with a grid of patches each; the last frame fills the last step.
    """
    import torch  # imported here: most processes that import this file do not need it

    kind = type(processor).__name__
    if kind not in _TIMED:
        raise NotAnImage(f"a {kind} reads no videos; models of {', '.join(_TIMED)} do")
    if len({tuple(frame["image_grid_thw"][0].tolist()) for frame in frames}) > 1:
        raise NotAnImage("the frames of a video have different sizes")
    depth = processor.image_processor.temporal_patch_size
    places = [min(place, len(frames) - 1) for place in range(-(-len(frames) // depth) * depth)]
    # A picture is a step of equal frames.
    slices = [frame["pixel_values"].unflatten(1, (_CHANNELS, depth, -1))[:, :, 0] for frame in frames]
    steps = [places[i : i + depth] for i in range(0, len(places), depth)]
    grid = frames[0]["image_grid_thw"].clone()
    grid[0, 0] = len(steps)
    count = int(grid[0, 1] * grid[0, 2]) // processor.image_processor.merge_size**2
    tensors = {
        "pixel_values": torch.cat([torch.stack([slices[p] for p in s], 2).flatten(1) for s in steps]),
        "image_grid_thw": grid,
    }
    if not _TIMED[kind]:
        tensors[SECONDS] = torch.tensor([depth / video.fps])
        return [processor.video_token_id] * (count * len(steps)), tensors
    ids: list[int] = []
    for step in steps:
        time = (step[0] + step[-1]) / video.fps / 2
        ids += processor.tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False)
        tokens = [processor.video_token_id] * count
        ids += [processor.vision_start_token_id, *tokens, processor.vision_end_token_id]
    return ids, tensors
