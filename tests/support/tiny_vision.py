"""Tiny random vision-language models with byte tokenizers, in folders that look like hub checkpoints."""

import json
from pathlib import Path

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "idefics3")
_QWEN = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *("<end_of_utterance>", *_TILES),
)
_IMAGE = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "idefics": "<image>"}
_VIDEO = {"qwen": "<|vision_start|><|video_pad|><|vision_end|>", "idefics": ""}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'video' %}VIDEO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _kind(family: str) -> str:
    return "qwen" if family.startswith("qwen") else "idefics"


def make_tokenizer(family: str):
    """One token per byte, and the special tokens of the family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens(list(_QWEN if _kind(family) == "qwen" else _IDEFICS), special_tokens=True)
    fast.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    kind = _kind(family)
    fast.chat_template = _TEMPLATE.replace("IMAGE", _IMAGE[kind]).replace("VIDEO", _VIDEO[kind])
    return fast


def _text(tokenizer, **more) -> dict:
    return {
        **dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2),
        **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048),
        **dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None),
        **more,
    }


def make_config(family: str, tokenizer):
    import transformers

    def special(token):
        return tokenizer.convert_tokens_to_ids(token)

    if family in ("qwen3_vl", "qwen3_vl_moe"):
        rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True)
        text = _text(tokenizer, num_hidden_layers=3, head_dim=16, rope_parameters=rope)
        if family == "qwen3_vl_moe":
            text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        vision = dict(
            depth=3, num_heads=2, patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]
        )
    elif family == "qwen2_5_vl":
        rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
        text = _text(tokenizer, rope_parameters=rope)
        vision = dict(depth=2, num_heads=2, patch_size=14, window_size=56, fullatt_block_indexes=[1])
    if _kind(family) == "qwen":
        vision |= dict(
            hidden_size=32,
            intermediate_size=64,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=64,
        )
        names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
        tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
        ids = {f"{name}_id": special(token) for name, token in zip(names, tokens, strict=True)}
        kinds = {"qwen3_vl": "Qwen3VLConfig", "qwen3_vl_moe": "Qwen3VLMoeConfig"}
        kind = getattr(transformers, kinds.get(family, "Qwen2_5_VLConfig"))
        return kind(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
    )
    kind = transformers.SmolVLMConfig if family == "smolvlm" else transformers.Idefics3Config
    text = _text(tokenizer, model_type="llama")
    return kind(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=special("<image>"),
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )


def _processor_files(family: str) -> dict:
    if _kind(family) == "qwen":
        patch = 14 if family == "qwen2_5_vl" else 16
        image = dict(
            image_processor_type="Qwen2VLImageProcessor",
            patch_size=patch,
            merge_size=2,
            temporal_patch_size=2,
        )
        image["size"] = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * patch**2}
        name = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"
        return {"image_processor": image, "processor_class": name}
    name = "SmolVLM" if family == "smolvlm" else "Idefics3"
    image = dict(
        image_processor_type=f"{name}ImageProcessor",
        size={"longest_edge": 128},
        max_image_size={"longest_edge": 64},
    )
    return {"image_processor": image, "processor_class": f"{name}Processor", "image_seq_len": 4}


def make_vision_folder(path: str | Path, family: str) -> Path:
    """Config, tokenizer and processor alone."""
    path, tokenizer = Path(path), make_tokenizer(family)
    make_config(family, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    parts = _processor_files(family)
    (path / "preprocessor_config.json").write_text(
        json.dumps(parts["image_processor"] | {"processor_class": parts["processor_class"]})
    )
    rest = {name: value for name, value in parts.items() if name != "image_processor"}
    (path / "processor_config.json").write_text(json.dumps(rest))
    return path


def make_vision_model(path: str | Path, family: str, *, seed: int = 0, std: float = 0.12) -> Path:
    """Write config, fp32 weights, tokenizer and processor to `path`, and return it."""
    import torch
    from transformers import AutoModelForImageTextToText

    path = make_vision_folder(path, family)
    tokenizer = make_tokenizer(family)
    config = make_config(family, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # the usual start is too small to show mistakes
                    parameter.normal_(0.0, std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    return path


def make_picture(seed: int, width: int = 64, height: int = 48):
    """A picture of coloured noise, in blocks so that resizing keeps it."""
    import numpy as np
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
