"""Processors of vision-language models where torchvision is not installed: for pictures, without videos.

transformers builds the processors of these families only together with one for videos, which needs
torchvision. Their parts for pictures and text work without it.
"""

from typing import Any

from slime.utils.models.model_config import read_config

# The class that makes prompts of each type of model. SmolVLM's own needs a video processor; its pictures
# are written as Idefics 3 writes them.
_CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "Idefics3Processor",
}


def processor_from_parts(path: str) -> Any | None:
    """The processor of a model folder for pictures alone; None: of a family that is not known here."""
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
    """The class, with a part that is None allowed to be missing."""

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = WithoutVideos.__qualname__ = kind.__name__
    return WithoutVideos
