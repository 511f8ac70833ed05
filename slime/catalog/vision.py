"""Vision-language families that can be trained and served with images, and why others cannot."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Names of the parts of one family's model in transformers, below `model`."""

    text: str  # the text model
    help: str
    tower: tuple[str, ...]  # turns pixels into features: the vision model and the projection to text
    grid_positions: bool = False  # image tokens have positions in height and width (mrope)
    tiles: bool = False  # pictures are cut into tiles of one size, and not into rows of patches
    videos: bool = False  # reads videos too
    steps_apart: bool = False  # text stands between the steps of a video: each is a grid of its own


VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily("language_model", "Qwen2.5-VL", ("visual",), grid_positions=True, videos=True),
    "qwen3_vl": VisionFamily(
        "language_model", "Qwen3-VL", ("visual",), grid_positions=True, videos=True, steps_apart=True
    ),
    "qwen3_vl_moe": VisionFamily(
        "language_model", "Qwen3-VL MoE", ("visual",), grid_positions=True, videos=True, steps_apart=True
    ),
    "idefics3": VisionFamily("text_model", "Idefics 3", ("vision_model", "connector"), tiles=True),
    "smolvlm": VisionFamily("text_model", "SmolVLM", ("vision_model", "connector"), tiles=True),
}
_BOTH_WAYS = (
    "tokens of one of its images see each other in both directions, which packed training does not do"
)
_TEXT_ALONE = "transformers builds its text model alone here, without the tower"
_REFUSED = {
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "paligemma"), _BOTH_WAYS),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _TEXT_ALONE),
}


def why_no_images(model_type: str | None) -> str | None:
    """Return why models of this type cannot receive images; None: they can."""
    if model_type in VISION_FAMILIES:
        return None
    why = _REFUSED.get(model_type or "", "slime does not know it as a vision-language family")
    return f"{model_type}: {why}; images are trained with {', '.join(VISION_FAMILIES)}"


def why_no_videos(model_type: str | None) -> str | None:
    """Return why models of this type cannot receive videos; None: they can."""
    readers = [name for name, family in VISION_FAMILIES.items() if family.videos]
    return None if model_type in readers else f"{model_type} reads no videos here; {', '.join(readers)} do"
