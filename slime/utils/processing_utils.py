"""Load a model's tokenizer and processor, and encode images the way rollout engines take them."""

import functools
import logging
from typing import Any

from slime.utils.media.pictures import open_picture, picture_url
from slime.utils.media.processors import processor_from_parts

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


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, without special tokens around it.

    By the half of transformers' tokenizer that is written in Rust where that is all that would be asked: it
    takes a third of the time.
    """
    kind: Any = type(tokenizer)
    rust = tokenizer.backend_tokenizer if _is_transformers_own(kind) else None
    if (
        rust is None
        or rust.truncation is not None
        or rust.padding is not None
        or rust.encode_special_tokens != tokenizer.split_special_tokens
    ):
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids: list[int] = rust.encode(text, add_special_tokens=False).ids
    return ids


@functools.lru_cache(maxsize=8)
def _is_transformers_own(kind: Any) -> bool:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast  # as above

    return bool(
        issubclass(kind, PreTrainedTokenizerFast)
        and kind.encode is PreTrainedTokenizerBase.encode
        and getattr(kind, "_encode_plus", None) is getattr(PreTrainedTokenizerFast, "_encode_plus", kind)
    )


@functools.lru_cache(maxsize=8)
def load_processor(name_or_path: str, *, trust_remote_code: bool = False) -> Any | None:
    """The processor of a multimodal model; None when the model takes text only.

    Without torchvision the known vision-language families get one for pictures alone.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase  # as above

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (ImportError, AttributeError) as error:  # a missing package shows as either
        processor = processor_from_parts(name_or_path)
        if processor is None:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{name_or_path}: its processor needs a package that is not installed ({why}); pip install "
                "torchvision, or use a model without pictures."
            ) from error
    except (OSError, ValueError) as error:
        logger.warning("%s has no processor, media cannot be used with it: %s", name_or_path, error)
        return None
    # For a text model transformers answers with its tokenizer.
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def process_vision_info(prompt: list[dict[str, Any]], processor: Any = None) -> dict[str, Any]:
    """The pictures of a conversation as `{"images": [...] or None, "videos": None}`, in their order.

    Parts of messages look like {"type": "image", "image": path, bytes, URL or PIL picture}, or as OpenAI
    writes them; `min_pixels` and `max_pixels` beside them bound the size.
    """
    images = []
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image", "image_url", "input_image"):
                images.append(open_picture(part))
            elif kind in ("video", "audio"):
                raise ValueError(f"a message holds a part of type {kind!r}: only pictures are read.")
    return {"images": images or None, "videos": None}


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keywords of a processor call: the media, as tensors, beside token ids that stay lists."""
    kwargs = dict(multimodal_inputs or {})
    for part in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        kwargs[part] = {**kwargs.get(part, {}), "return_tensors": "pt"}
    text = {"return_tensors": None, "return_mm_token_type_ids": False}
    kwargs["text_kwargs"] = {**kwargs.get("text_kwargs", {}), **text}
    return kwargs


def encode_image_for_rollout_engine(image: Any) -> str:
    """A picture as the PNG data URI that engines accept; text (a path, an address, a URI) stays."""
    return image if isinstance(image, str) else picture_url(open_picture(image))
