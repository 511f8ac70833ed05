"""Flags and rules of images: which models take them, and what does not go together with them."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, lacks
from slime.arguments.groups.trainer import FSDP
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.catalog.vision import VISION_FAMILIES, why_no_images, why_no_videos
from slime.utils.models.model_config import read_config


@dataclass
class ImageFlags:
    """Images."""

    multimodal_keys: dict | None = flag(
        None, 'columns of media, as JSON: {"image": "images", "video": "videos"}', only_with=lacks("env")
    )
    freeze_vision_tower: bool = flag(False, "train only the text model of a vision model", only_with=FSDP)


def images(draft: Draft) -> None:
    """Require a model family for which computation with images was verified."""
    keys = draft.multimodal_keys
    if keys and (not keys.keys() <= {"image", "video"} or not all(isinstance(k, str) for k in keys.values())):
        raise ValueError(
            f'--multimodal-keys is {keys}: give the columns of images and videos, as {{"image": "images"}} '
            'or {"video": "videos"}; sound is not trained.'
        )
    kind = read_config(draft.hf_checkpoint).get("model_type") if draft.hf_checkpoint else None
    if keys and kind is not None and (why := why_no_images(kind)) is not None:
        raise ValueError(f"--multimodal-keys with --hf-checkpoint {draft.hf_checkpoint}: {why}.")
    videos = "video" in (keys or {})
    if videos and kind is not None and (why := why_no_videos(kind)) is not None:
        raise ValueError(f"--multimodal-keys with --hf-checkpoint {draft.hf_checkpoint}: {why}.")
    if (keys or kind in VISION_FAMILIES) and not draft.debug_rollout_only:
        _check_trainer(draft, "--multimodal-keys" if keys else f"a model of type {kind}")
    engine = ENGINES[draft.rollout_engine]
    if kind in VISION_FAMILIES and not draft.debug_train_only and engine.rules.lacks_images_of(kind, videos):
        lacks = "gets no videos from slime" if videos else f"has no model of type {kind}"
        raise ValueError(
            f"--rollout-engine {draft.rollout_engine}: {engine.label} {lacks}; use --rollout-engine embedded."
        )


def _check_trainer(draft: Draft, what: str) -> None:
    if not BACKENDS[draft.train_backend].trains_transformers_model:
        raise ValueError(
            f"{what} with --train-backend {draft.train_backend}: it builds no vision tower; use "
            "--train-backend fsdp."
        )
