"""Flags and rules of images: which models take them, and what does not go together with them."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, option_of
from slime.arguments.groups.trainer import FSDP
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.catalog.vision import VISION_FAMILIES, why_no_images
from slime.utils.models.model_config import read_config


@dataclass
class ImageFlags:
    """Images."""

    multimodal_keys: dict | None = flag(
        None, 'columns of media, as JSON: {"image": "images"}', metavar="JSON"
    )
    freeze_vision_tower: bool = flag(
        False, "train only the text model of a vision-language model", only_with=FSDP
    )


def images(draft: Draft) -> None:
    """Models that are given images must be of a family that is known to compute them right."""
    keys = draft.multimodal_keys
    if keys:
        _check_keys(keys)
    kind = read_config(draft.hf_checkpoint).get("model_type") if draft.hf_checkpoint else None
    if keys and kind is not None and (why := why_no_images(kind)) is not None:
        raise ValueError(f"--multimodal-keys with --hf-checkpoint {draft.hf_checkpoint}: {why}.")
    if keys or kind in VISION_FAMILIES:
        _check_trainer(draft, "--multimodal-keys" if keys else f"a model of type {kind}")
    if kind in VISION_FAMILIES:
        _check_engine(draft, str(kind))


def _check_keys(keys: dict) -> None:
    if list(keys) != ["image"] or not isinstance(keys["image"], str):
        raise ValueError(
            f'--multimodal-keys is {keys}: give the column of images, as {{"image": "images"}}; videos '
            "and sound are not trained."
        )


def _check_trainer(draft: Draft, what: str) -> None:
    if draft.debug_rollout_only:
        return
    if not BACKENDS[draft.train_backend].trains_transformers_model:
        raise ValueError(
            f"{what} with --train-backend {draft.train_backend}: it builds no vision tower; use "
            "--train-backend fsdp."
        )
    alone = {
        "tensor_model_parallel_size": "its matrices are not cut with the tower",
        "context_parallel_size": "images stand on one rank with all tokens of their sample",
    }
    for name, reason in alone.items():
        if getattr(draft, name) > 1:
            option = option_of(name)
            raise ValueError(f"{what} with {option} {getattr(draft, name)}: {reason}; use {option} 1.")
    if draft.lora_rank:
        raise ValueError(
            f"{what} with --lora-rank {draft.lora_rank}: adapters are for models of text; use --lora-rank 0, "
            "and --freeze-vision-tower to train less."
        )


def _check_engine(draft: Draft, kind: str) -> None:
    engine = ENGINES[draft.rollout_engine]
    if not draft.debug_train_only and engine.rules.lacks_images_of(kind):
        raise ValueError(
            f"--rollout-engine {draft.rollout_engine}: {engine.label} has no model of type {kind}; use "
            "--rollout-engine embedded."
        )
