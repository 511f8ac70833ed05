"""Load a model's tokenizer and processor, and encode images the way rollout engines take them."""

import base64
import functools
import io
import logging
from typing import Any

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=8)
def load_tokenizer(
    name_or_path: str, chat_template_path: str | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a hub name or folder; code that ships with it runs only if `trust_remote_code`."""
    from transformers import AutoTokenizer  # slow to import, and plug-ins import this module for other names

    if name_or_path is None:
        raise ValueError(
            "--hf-checkpoint is not set: a tokenizer is needed for prompts; name a model folder or hub id."
        )
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # What transformers makes of a folder without the files of a tokenizer.
        raise ValueError(
            f"{name_or_path} has no tokenizer: its vocabulary is empty, so every prompt would be."
        )
    if chat_template_path is not None:
        with open(chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


@functools.lru_cache(maxsize=8)
def load_processor(name_or_path: str, *, trust_remote_code: bool = False) -> Any | None:
    """The processor of a multimodal model; None when the model takes text only."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase  # as above

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        logger.warning("%s has no processor, media cannot be used with it: %s", name_or_path, error)
        return None
    # For a text model transformers answers with its tokenizer.
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keywords of a processor call: the media, as tensors, beside token ids that stay lists."""
    kwargs = dict(multimodal_inputs or {})
    for part in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        kwargs[part] = {**kwargs.get(part, {}), "return_tensors": "pt"}
    kwargs["text_kwargs"] = {**kwargs.get("text_kwargs", {}), "return_tensors": None}
    return kwargs


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as the PNG data URI that engines accept; text (a path, an address, a URI) stays."""
    if isinstance(image, str):
        return image
    buffer = io.BytesIO()
    (image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
