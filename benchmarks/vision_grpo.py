"""A GRPO run of a vision-language model with engine and trainer on one device.

Random weights of a real shape, so nothing needs a download. A prompt is a red or a blue picture and some
text; the reward is the share of token ids in the answer that are even (red) or odd (blue): one half by
chance, and only a policy that sees the picture gets beyond it. The run is an ordinary one (`slime train`);
this script makes model and pictures, and then reads the metrics: reward, log-prob difference between engine
and trainer, seconds of each part, tokens per second.

    python benchmarks/vision_grpo.py --shape tiny                          # embedded engine, any machine
    python benchmarks/vision_grpo.py --shape qwen3-vl-2b --engine sglang --sglang-python PATH    # one GPU
"""

import argparse
import base64
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from colocated_grpo import CHANCE, COLUMNS, MOVED, read_steps, report

from slime.arguments import parse_args
from slime.cli.main import user_errors
from slime.cli.quickstart import tiny
from slime.utils.machine.accelerator import device_count, empty_cache

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
COLOURS = {"even": (200, 40, 40), "odd": (40, 40, 200)}
VOCAB = 512  # few tokens, so that each is tried often enough to learn about it within some steps
LEARNING_RATES = {"tiny": 5e-3, "qwen3-vl-2b": 5e-5, "qwen2.5-vl-3b": 5e-5}
SIZES = {"tiny": 64, "qwen3-vl-2b": 448, "qwen2.5-vl-3b": 448}  # no picture of this side is resized
TEXT = {
    "tiny": dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2),
    "qwen3-vl-2b": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen2.5-vl-3b": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16
    ),
}
VISION = {
    "tiny": dict(
        **dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=16),
        **dict(out_hidden_size=64, num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
    "qwen3-vl-2b": dict(
        **dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16),
        **dict(out_hidden_size=2048, num_position_embeddings=2304, deepstack_visual_indexes=[5, 11, 17]),
    ),
    "qwen2.5-vl-3b": dict(
        **dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14),
        **dict(out_hidden_size=2048, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
    ),
}


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of token ids in the answer whose parity is that of the picture's colour."""
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    odd = sample.label == "odd"
    return sum(token % 2 == odd for token in answer) / max(1, len(answer))


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(TEXT))
    parser.add_argument("--layers", type=int, help="of the text model; default: all of the shape")
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--images", type=int, default=1, help="pictures of each prompt")
    parser.add_argument("--image-size", type=int, help="side of a picture in pixels; default: by shape")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--lr", type=float, help="default: by shape")
    parser.add_argument("--run-dir", type=Path, help="default: a temporary folder")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/vision_grpo.json"))
    return parser.parse_known_args()


def make_config(shape: str, tokenizer: Any, layers: int | None) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    first, small = shape == "qwen2.5-vl-3b", shape == "tiny"
    section = [16, 24, 24] if first else [8, 4, 4] if small else [24, 20, 20]
    rope = dict(rope_type="default", rope_theta=1e6 if first else 5e6, mrope_section=section)
    text = dict(
        **dict(vocab_size=VOCAB, max_position_embeddings=2048 if small else 32768, bos_token_id=None),
        **dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id),
        **dict(num_key_value_heads=2 if first else 1 if small else 8, tie_word_embeddings=True),
        rope_parameters=rope if first else rope | {"mrope_interleaved": True},
    )
    text |= TEXT[shape] | ({"num_hidden_layers": layers} if layers else {})
    text |= {} if first else {"head_dim": 32 if small else 128}
    text |= {"initializer_range": 0.08} if small else {}
    vision = dict(spatial_merge_size=2, temporal_patch_size=2, **VISION[shape])
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    kind = Qwen2_5_VLConfig if first else Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def make_model(shape: str, folder: Path, *, layers: int | None, side: int) -> Path:
    """A model folder as the hub has them, with a tokenizer of single characters."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForImageTextToText

    folder.mkdir(parents=True)
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template = TEMPLATE
    config = make_config(shape, tokenizer, layers)
    tokenizer.model_max_length = config.get_text_config().max_position_embeddings
    tokenizer.save_pretrained(folder)
    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda" if device_count() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    del model
    empty_cache()  # engine and trainer will want the room
    first = shape == "qwen2.5-vl-3b"
    size = {"shortest_edge": side**2, "longest_edge": side**2}
    common = dict(processor_class="Qwen2_5_VLProcessor" if first else "Qwen3VLProcessor")
    common |= dict(patch_size=VISION[shape]["patch_size"], merge_size=2, temporal_patch_size=2, size=size)
    pictures = {"image_processor_type": "Qwen2VLImageProcessor"} | common
    videos = {"video_processor_type": "Qwen2VLVideoProcessor" if first else "Qwen3VLVideoProcessor"} | common
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": common["processor_class"]}))
    return folder


def draw(label: str, side: int, rng: random.Random) -> str:
    """A picture of fields in shades of the label's colour, as a data URL."""
    from PIL import Image

    fields = Image.new("RGB", (8, 8))
    for x in range(8):
        for y in range(8):
            shade = rng.uniform(0.6, 1.2)
            red, green, blue = (min(255, int(shade * value)) for value in COLOURS[label])
            fields.putpixel((x, y), (red, green, blue))
    out = io.BytesIO()
    fields.resize((side, side), Image.Resampling.NEAREST).save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def flags(options: argparse.Namespace, folder: Path) -> list[str]:
    rng, side = random.Random(0), options.image_size or SIZES[options.shape]
    rows = []
    for number in range(options.steps * options.prompts):
        label = ("even", "odd")[number % 2]
        text = "<image>" * options.images + "".join(rng.choices(tiny.CHARACTERS, k=32)).replace("<", ".")
        pictures = [draw(label, side, rng) for _ in range(options.images)]
        rows.append({"input": text, "label": label, "images": pictures})
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "--hf-checkpoint": make_model(options.shape, folder / "model", layers=options.layers, side=side),
        "--run-dir": options.run_dir or folder / "run",
        "--prompt-data": prompts,
        "--label-key": "label",
        "--multimodal-keys": '{"image": "images"}',
        "--custom-rm-path": f"{__file__}:reward",
        "--num-rollout": options.steps,
        "--rollout-batch-size": options.prompts,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": options.output_tokens,
        "--rollout-engine": options.engine,
        "--lr": options.lr or LEARNING_RATES[options.shape],
        "--lr-decay-style": "constant",
        "--max-tokens-per-gpu": 32768,
        "--actor-num-gpus-per-node": 1,
    }
    words = [str(token) for item in settings.items() for token in item]
    return [*words, "--apply-chat-template", "--colocate", "--use-dynamic-batch-size"]


def main() -> int:
    options, extra = parse()
    from slime.loop import train  # brings trainer and engines, which --help need not wait for

    with tempfile.TemporaryDirectory() as name:
        with user_errors():
            args = parse_args([*flags(options, Path(name)), *extra])
        train(args)
        steps = read_steps(Path(args.run_dir) / "metrics.jsonl")
    COLUMNS["rollout t/s"] = "perf/tokens_per_gpu_per_sec"
    COLUMNS["train t/s"] = "perf/actor_train_tok_per_s"
    report(steps)
    rewards = [step["rollout/raw_reward"] for step in steps if "rollout/raw_reward" in step]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} ({CHANCE} by chance)")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"flags": extra, "rewards": rewards, "steps": steps}, indent=1) + "\n")
    return 0 if rewards[-1] - rewards[0] > MOVED else 1


if __name__ == "__main__":
    sys.exit(main())
