"""Compares vision-language models on the FSDP trainer with transformers, on packed documents with images.

The small model has both towers; pixels are random numbers, so that no processor is needed. Log-probs and the
gradients of both towers are compared.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.vision.towers import family_of, num_image_tokens, smallest_picture
from slime.arguments import default_args
from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batch
from slime.catalog.vision import VISION_FAMILIES
from slime.cli.one_rank import alone
from slime.cli.verify_model import shrink
from slime.utils.types import RolloutBatch

_HEAD_DIM, _HEADS = 16, 4
_RESPONSES = (5, 7, 4)
# Images of each document: rows and columns of patches, or the number of tiles.
_SHOWN: tuple[tuple[tuple[int, int], ...], ...] = (((2, 3),), (), ((1, 2), (3, 1)))


def has_images(config: Any) -> bool:
    return family_of(config) is not None


def shrink_both(config: Any, *, layers: int) -> Any:
    """Return a config of the family with few layers and narrow towers; the vocabulary stays."""
    values = copy.deepcopy(config.to_dict())
    text, vision = values["text_config"], values["vision_config"]
    width = _HEAD_DIM * _HEADS
    text |= dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, head_dim=_HEAD_DIM)
    text |= dict(num_attention_heads=_HEADS, num_key_value_heads=2)
    text.pop("layer_types", None)  # derived again for fewer layers
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("mrope_section"):
        rope["mrope_section"] = [4, 2, 2]
    heads = {"num_heads", "num_attention_heads"} & set(vision)
    vision |= dict.fromkeys(heads, 2) | dict(hidden_size=32, intermediate_size=64)
    vision |= {name: 2 for name in ("depth", "num_hidden_layers") if name in vision}
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = width
    vision |= {"fullatt_block_indexes": [1]} if "fullatt_block_indexes" in vision else {}
    vision |= {"deepstack_visual_indexes": [0]} if "deepstack_visual_indexes" in vision else {}
    for part in (values, text):
        part.pop("quantization_config", None)
        part["dtype"] = "float32"
    return type(config).from_dict(values)


def build(config: Any, folder: Path) -> None:
    # Heavy import, only needed here.
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    shrink.draw(model)
    model.save_pretrained(folder)


def documents(config: Any) -> RolloutBatch:
    """Return three documents: with one image, with none, with two."""
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> Tensor:
        return torch.randint(5, 250, (count,), generator=generator)

    every_tokens, every_media = [], []
    for images, length in zip(_SHOWN, _RESPONSES, strict=True):
        media = _media(config, images, generator) if images else None
        parts = [words(3)]
        for rows, columns in images:
            tiles = VISION_FAMILIES[config.model_type].tiles
            count = num_image_tokens(config, media or {}) // len(images) if tiles else rows * columns
            parts += [torch.full((count,), config.image_token_id), words(2)]
        every_tokens.append(torch.cat([*parts, words(length)]))
        every_media.append(media)
    batch: dict[str, Any] = {
        "tokens": every_tokens,
        "response_lengths": list(_RESPONSES),
        "multimodal_train_inputs": every_media,
        "loss_masks": [torch.ones(length) for length in _RESPONSES],
        "rollout_mask_sums": [1.0] * len(_RESPONSES),
        "sample_indices": list(range(len(_RESPONSES))),
    }
    return batch  # type: ignore[return-value]


def _media(config: Any, images: tuple[tuple[int, int], ...], generator: torch.Generator) -> dict[str, Any]:
    """Return random pixels in the shapes of the family's processor."""
    made: dict[str, Any] = smallest_picture(config, torch.device("cpu"))
    if VISION_FAMILIES[config.model_type].tiles:
        made = {name: tensor.repeat_interleave(len(images), dim=1) for name, tensor in made.items()}
    else:
        merge = config.vision_config.spatial_merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in images])
        patches = torch.empty(int(grid.prod(-1).sum()), made["pixel_values"].shape[1])
        made = {"pixel_values": patches, "image_grid_thw": grid}
    made["pixel_values"] = torch.randn(made["pixel_values"].shape, generator=generator)
    return made


def reference(folder: Path, batch: RolloutBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Compute log-probs and the gradients of their sum with transformers, one document at a time."""
    # Heavy import, only needed here.
    from transformers import AutoModelForImageTextToText

    lm = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for tokens, media, length in zip(
        batch["tokens"], batch["multimodal_train_inputs"], batch["response_lengths"], strict=True
    ):
        options = dict(media or {})
        if "image_grid_thw" in options:
            options["mm_token_type_ids"] = (tokens[None] == lm.config.image_token_id).int()
        logits = lm(input_ids=tokens[None], use_cache=False, **options).logits[0].float()
        table = torch.log_softmax(logits[-length - 1 : -1], -1)
        found.append(table.gather(1, tokens[-length:, None])[:, 0])
    torch.cat(found).sum().backward()
    gradients = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return [one.detach() for one in found], gradients


def trainer(folder: Path, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute log-probs and gradients of one packed micro-batch with the FSDP trainer."""
    args = default_args(hf_checkpoint=str(folder), dtype="float32", run_dir=str(folder.parent))
    with alone():
        backend = create_backend(args, rank=0, world_size=1, device="cpu")
        mb, share = backend._send(build_micro_batch(batch, range(len(_RESPONSES))), backend.model)
        log_probs = backend._forward(mb, share).log_probs
        log_probs.sum().backward()
    named = backend.model.lm.named_parameters()
    return log_probs.detach(), {name: p.grad for name, p in named if p.grad is not None}


def verify(options: Any, config: Any, folder: Path) -> int:
    """Print what was found and return the number of differences above the tolerance."""
    small = shrink_both(config, layers=options.layers)
    build(small, folder / "model")
    batch = documents(small)
    started = time.monotonic()
    expected, gradients = reference(folder / "model", batch)
    found, own = trainer(folder / "model", batch)
    scale = max(float(g.abs().max()) for g in gradients.values())
    apart = {
        "log-probs": float((torch.cat(expected) - found).abs().max()),
        "gradients": max(float((own[name] - g).abs().max()) for name, g in gradients.items()) / scale,
    }
    model = f"{options.hf_checkpoint}, as a small {small.model_type} with both towers"
    print(f"{model}, compared with transformers")
    for what, value in apart.items():
        print(f"fsdp, packed with images  {what:10}  {value:.1e}")
    wrong = [what for what, value in apart.items() if not value <= options.tolerance]
    print(f"{', '.join(wrong)} differ" if wrong else f"all agree, in {time.monotonic() - started:.0f} s")
    return len(wrong)
