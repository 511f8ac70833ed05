"""Loads a model's tokenizer and processor, and encodes images as rollout engines expect them."""

import functools
import logging
from typing import Any

from slime.utils.media.pictures import open_picture, picture_url
from slime.utils.models.model_config import read_config

logger = logging.getLogger(__name__)

# The processor class of each type of model. SmolVLM's own needs a video processor; its image tokens are those
# of Idefics 3.
_CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "Idefics3Processor",
}


@functools.lru_cache(maxsize=8)
def load_tokenizer(
    name_or_path: str, chat_template_path: str | None = None, *, trust_remote_code: bool = False
) -> Any:
    """Load the tokenizer of a hub name or folder; its own code runs only if `trust_remote_code`."""
    from transformers import AutoTokenizer  # slow to import, and plug-ins import this module for other names

    if name_or_path is None:
        raise ValueError(
            "--hf-checkpoint is not set: a tokenizer is needed for prompts; name a model folder or hub id."
        )
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    # slime checks lengths on its own; this mutes a warning of transformers about long texts.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # transformers returns such a tokenizer for a folder without tokenizer files.
        raise ValueError(
            f"{name_or_path} has no tokenizer: its vocabulary is empty, so every prompt would be empty."
        )
    if chat_template_path is not None:
        with open(chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, without special tokens around it."""
    return list(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=8)
def load_processor(name_or_path: str, *, trust_remote_code: bool = False) -> Any | None:
    """Load the processor of a multimodal model; None when the model takes text only.

    Without torchvision the known vision-language families get one for pictures alone.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase  # as above

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (ImportError, AttributeError) as error:  # a missing package shows as either
        processor = _processor_from_parts(name_or_path)
        if processor is None:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{name_or_path}: its processor needs a package that is not installed ({why}); pip install "
                "torchvision, or use a model without pictures."
            ) from error
    except (OSError, ValueError) as error:
        logger.warning(
            "Model %s has no processor, so prompts with media cannot be used: %s", name_or_path, error
        )
        return None
    # For a text model transformers returns its tokenizer.
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _processor_from_parts(path: str) -> Any | None:
    """Build a processor for pictures alone; None: the model is of an unknown family.

    transformers builds the processors of these families only with one for videos, which needs torchvision.
    """
    import transformers  # heavy, and only needed here

    name = _CLASSES.get(str(read_config(path).get("model_type")))
    if name is None:
        return None
    kind = _without_videos(getattr(transformers, name))
    parts: dict[str, Any] = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(path),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(path),
    }
    config = read_config(path, "processor_config.json")
    if "image_seq_len" in config:
        parts["image_seq_len"] = config["image_seq_len"]
    return kind(**parts, chat_template=parts["tokenizer"].chat_template)


def _without_videos(kind: Any) -> Any:
    """Return the class, with parts that are None allowed to be missing."""

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = WithoutVideos.__qualname__ = kind.__name__
    return WithoutVideos


def process_vision_info(prompt: list[dict[str, Any]], processor: Any = None) -> dict[str, Any]:
    """Return the pictures of a conversation as `{"images": [...] or None, "videos": None}`, in their order.

    Parts of messages have the form {"type": "image", "image": path, bytes, URL or PIL picture}, or OpenAI's
    form; `min_pixels` and `max_pixels` in a part bound the size.
    """
    images = []
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image", "image_url", "input_image"):
                images.append(open_picture(part))
            elif kind in ("video", "audio"):
                raise ValueError(f"a message holds a part of type {kind!r}: only pictures are supported.")
    return {"images": images or None, "videos": None}


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build the keywords of a processor call: media become tensors, token ids stay lists."""
    kwargs = dict(multimodal_inputs or {})
    for part in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        kwargs[part] = {**kwargs.get(part, {}), "return_tensors": "pt"}
    text = {"return_tensors": None, "return_mm_token_type_ids": False}
    kwargs["text_kwargs"] = {**kwargs.get("text_kwargs", {}), **text}
    return kwargs


def encode_image_for_rollout_engine(image: Any) -> str:
    """Encode a picture as the PNG data URI that engines accept; text (a path, an address, a URI) stays."""
    return image if isinstance(image, str) else picture_url(open_picture(image))
