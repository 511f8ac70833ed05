"""Pictures of coloured shapes: data, model and measure of the example.

python examples/geo_shapes/data.py DIR        a model with random weights, talks, prompts, held-out ones
python examples/geo_shapes/data.py tell DIR   before and after, of a run

A picture has four fields of 32 pixels, so that each is one token of the model; a field is empty or has a disc
or a square in it, red or blue. The question is always the same: how many red shapes?
"""

import base64
import hashlib
import io
import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import tool_model

from slime.cli.quickstart import tiny

COLOURS = ("none", "red", "blue")  # of the four fields
FIELD, MARGIN = 32, 4  # pixels
QUESTION = "<image>"
NUM_TALKS, NUM_PROMPTS, NUM_HELD_OUT = 7680, 1024, 128
PATCH = 16
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def draw(colours: tuple[str, ...], rng: random.Random) -> str:
    """The picture as a data URL; each shape is a disc or a square by chance."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (2 * FIELD, 2 * FIELD), "black")
    pen = ImageDraw.Draw(image)
    for place, colour in enumerate(colours):
        left, top = place % 2 * FIELD + MARGIN, place // 2 * FIELD + MARGIN
        box = (left, top, left + FIELD - 2 * MARGIN, top + FIELD - 2 * MARGIN)
        if colour != "none":
            rng.choice((pen.ellipse, pen.rectangle))(box, fill=colour)
    out = io.BytesIO()
    image.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def is_held_out(colours: tuple[str, ...]) -> bool:
    """One arrangement of colours in five is held out, in all its shapes."""
    return hashlib.sha256(" ".join(colours).encode()).digest()[0] % 5 == 0


def pictures(rng: random.Random, *, held_out: bool):
    while True:
        colours = tuple(rng.choice(COLOURS) for _ in range(4))
        if is_held_out(colours) == held_out:
            yield colours, draw(colours, rng)


def talk(colours: tuple[str, ...], url: str, rng: random.Random) -> dict:
    """Half of the answers count what is red, half what is blue: nothing says which is better."""
    answer = str(colours.count(rng.choice(("red", "blue"))))
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [url]}


def make_model(folder: Path) -> None:
    """A Qwen3-VL of a few hundred thousand weights, both towers at random."""
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, tiny.CONTEXT_LEN
    tokenizer.save_pretrained(folder)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 4, 4], mrope_interleaved=True)
    text = dict(
        **dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2),
        **dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.08),
        **dict(max_position_embeddings=tiny.CONTEXT_LEN, rope_parameters=rope, bos_token_id=None),
        **dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id),
    )
    vision = dict(
        **dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=PATCH),
        **dict(spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=16),
        **dict(deepstack_visual_indexes=[0], initializer_range=0.05),
    )
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    torch.manual_seed(7)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    size = {"shortest_edge": (2 * FIELD) ** 2, "longest_edge": (2 * FIELD) ** 2}
    processor = dict(image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen3VLProcessor")
    processor |= dict(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))


def main() -> None:
    if sys.argv[1] == "tell":
        tool_model.tell(sys.argv[2], ("eval/held_out", "eval/other_picture", "rollout/raw_reward"))
        return
    folder, rng = Path(sys.argv[1]), random.Random(7)
    make_model(folder / "model")
    training, held_out = pictures(rng, held_out=False), pictures(rng, held_out=True)
    talks = [talk(*one, rng) for one in itertools.islice(training, NUM_TALKS)]
    tool_model.write_rows(folder / "talks.jsonl", talks)
    for name, source, number in (("prompts", training, NUM_PROMPTS), ("held_out", held_out, NUM_HELD_OUT)):
        rows = [
            {"prompt": QUESTION, "label": str(colours.count("red")), "images": [url]}
            for colours, url in itertools.islice(source, number)
        ]
        tool_model.write_rows(folder / f"{name}.jsonl", rows)
        if name == "held_out":  # the control: each question with the picture of the next one
            moved = [row | {"images": rows[place - 1]["images"]} for place, row in enumerate(rows)]
            tool_model.write_rows(folder / "other_picture.jsonl", moved)


if __name__ == "__main__":
    main()
