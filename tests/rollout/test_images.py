"""Samples with pictures: tokens as the model's own processor makes them, one token each on the wire."""

import copy
import json

import pytest
import torch
from argument_helpers import declared
from tiny_vision import FAMILIES, make_picture, make_vision_folder

from slime.data.dataset import Dataset, prompt_lengths
from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.rollout.generation.generate_request import (
    PromptError,
    build_request,
    check_response,
    prepare_prompt,
)
from slime.rollout.generation.sample_images import append_messages, append_with_images
from slime.rollout.prompt_groups import copy_sample, group_from_plain, group_to_plain, without_response
from slime.utils import codec
from slime.utils.errors import EngineResponseError
from slime.utils.media.pictures import picture_key
from slime.utils.processing_utils import build_processor_kwargs, load_processor, load_tokenizer
from slime.utils.types import Sample
from slime.wire.protocol import Generation


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return str(make_vision_folder(tmp_path_factory.mktemp("vlm") / request.param, request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return str(make_vision_folder(tmp_path_factory.mktemp("vlm") / "qwen3_vl", "qwen3_vl"))


def write_rows(folder, rows):
    for seed, size in enumerate(((64, 48), (100, 70), (40, 120))):
        make_picture(seed, *size).save(folder / f"{seed}.png")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "data.jsonl")


def read(folder, model, rows, max_length=None):
    return Dataset(
        write_rows(folder, rows),
        load_tokenizer(model),
        load_processor(model),
        max_length,
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )


def test_prompts_are_those_of_the_models_own_processor(model, tmp_path):
    rows = [
        {"input": "<image>How many?", "images": ["0.png"]},
        {"input": "First <image> then <image>?", "images": ["1.png", str(tmp_path / "2.png")]},
        {"input": "no picture", "images": None},
    ]
    data, processor, tokenizer = read(tmp_path, model, rows), load_processor(model), load_tokenizer(model)
    lengths = prompt_lengths(data.samples, tokenizer, processor)
    for sample, length in zip(data.samples, lengths, strict=True):
        prepare_prompt(sample, tokenizer, processor)
        assert len(sample.tokens) == length
        if sample.multimodal_inputs is None:
            assert sample.multimodal_train_inputs is None
            continue
        expected = processor(text=[sample.prompt], **build_processor_kwargs(sample.multimodal_inputs))
        assert sample.tokens == list(expected["input_ids"][0])
        for name, tensor in sample.multimodal_train_inputs.items():
            assert torch.equal(tensor, expected[name]), name
        assert len(sample.image_spans) == len(sample.multimodal_inputs["images"])
    assert len(read(tmp_path, model, rows, max_length=min(lengths)).samples) == 1


def test_one_token_per_picture_goes_to_the_engine(model, tmp_path):
    data = read(tmp_path, model, [{"input": "a<image>b<image>", "images": ["0.png", "1.png"]}])
    sample, tokenizer, processor = data.samples[0], load_tokenizer(model), load_processor(model)
    prepare_prompt(sample, tokenizer, processor)
    args = declared(hf_checkpoint=model, vocab_size=len(tokenizer), rollout_engine="embedded")
    sample.append_response_tokens(tokens=[65, 66], log_probs=[-0.1, -0.2])
    request = build_request(args, sample, {"temperature": 1.0}, 4)
    body = request.to_json()
    assert body["input_ids"] == [*tokenizer.encode(sample.prompt, add_special_tokens=False), 65, 66]
    assert [picture_key(open_url(url)) for url in body["image_data"]] == [
        picture_key(p) for p in sample.multimodal_inputs["images"]
    ]
    check_response(args, request, answer([70], len(sample.tokens)))
    with pytest.raises(EngineResponseError, match="their processors differ"):
        check_response(args, request, answer([70], len(sample.tokens) + 1))
    with pytest.raises(EngineResponseError, match="holds the image token"):
        check_response(args, request, answer([processor.image_token_id], len(sample.tokens)))


def open_url(url):
    from slime.utils.media.pictures import open_picture

    return open_picture(url)


def answer(ids, prompt_tokens):
    meta = {"id": "r", "finish_reason": {"type": "length"}, "prompt_tokens": prompt_tokens}
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
    return Generation.from_json({"text": "", "output_ids": ids, "meta_info": meta})


def test_samples_of_a_group_share_their_pixels_and_survive_files(qwen, tmp_path):
    rows = [{"input": "<image><image>", "images": ["0.png", "1.png"]}]
    source = read(tmp_path, qwen, rows).samples[0]
    group = [copy_sample(source) for _ in range(3)]
    for sample in group:
        prepare_prompt(sample, load_tokenizer(qwen), load_processor(qwen))
    assert len({id(sample.multimodal_train_inputs) for sample in group}) == 1
    assert len({sample.multimodal_train_input_id for sample in group}) == 1
    plain = group_to_plain(group)
    codec.encode(plain)
    for restored in (group_from_plain(copy.deepcopy(plain)), dumped(group, tmp_path)):
        for before, after in zip(group, restored, strict=True):
            assert (after.tokens, after.image_spans) == (before.tokens, before.image_spans)
            assert [picture_key(p) for p in after.multimodal_inputs["images"]] == [
                picture_key(p) for p in before.multimodal_inputs["images"]
            ]
            pixels = after.multimodal_train_inputs["pixel_values"]
            assert torch.equal(pixels, before.multimodal_train_inputs["pixel_values"])


def dumped(group, folder):
    path = save_rollout_dump(str(folder / "d.pt"), 0, group)
    pixels = group[0].multimodal_train_inputs["pixel_values"].nbytes
    assert path.stat().st_size < 2 * pixels  # of three samples
    return load_rollout_dump(str(folder / "d.pt"), 0)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"input": "<image><image>", "images": ["0.png"]},
            r"line 1: more <image> placeholders .*has 1\.",
        ),
        ({"input": "what?", "images": ["0.png"]}, "line 1: fewer placeholders in the prompt than images"),
        ({"input": "<image>", "images": None}, r"line 1: more <image> placeholders .*has 0\."),
        ({"input": "<image>", "images": ["data.jsonl"]}, "line 1: image 1 of column 'images' .*known kind"),
        ({"input": "<image>", "images": ["no.png"]}, "line 1: image 1 of column 'images' .*does not exist"),
        ({"input": "<image>", "images": [{"image": "0.png", "max_pixels": 0}]}, "max_pixels is 0"),
        ({"input": "<image>", "images": [{"type": "video", "video": "a.mp4"}]}, "part of type 'video'"),
    ],
)
def test_a_row_with_a_wrong_picture_is_named(qwen, tmp_path, row, why):
    with pytest.raises(ValueError, match=why):
        read(tmp_path, qwen, [row])


def test_bounds_of_an_item_make_fewer_tokens(qwen, tmp_path):
    rows = [{"input": "<image>", "images": ["1.png"]}]
    rows += [{"input": "<image>", "images": [{"type": "image", "image": "1.png", "max_pixels": 1200}]}]
    whole, bounded = read(tmp_path, qwen, rows).samples
    for sample in (whole, bounded):
        prepare_prompt(sample, load_tokenizer(qwen), load_processor(qwen))
    assert len(bounded.tokens) < len(whole.tokens)


def test_a_model_without_a_processor_is_told(qwen):
    sample = Sample(prompt="x", multimodal_inputs={"images": [make_picture(0)]})
    with pytest.raises(PromptError, match="--multimodal-keys"):
        prepare_prompt(sample, load_tokenizer(qwen), None)
    with pytest.raises(PromptError, match="0 image tokens"):
        prepare_prompt(sample, load_tokenizer(qwen), load_processor(qwen))


def test_an_observation_with_pictures_continues_the_tokens(model, tmp_path):
    data = read(tmp_path, model, [{"input": "<image>Where?", "images": ["0.png"]}])
    sample, tokenizer, processor = data.samples[0], load_tokenizer(model), load_processor(model)
    prepare_prompt(sample, tokenizer, processor)
    written = tokenizer.encode("look again<|im_end|>", add_special_tokens=False)
    sample.append_response_tokens(tokens=written, log_probs=[-1.0] * len(written))
    before = list(sample.tokens)
    seen = [{"type": "text", "text": "zoomed: "}, {"type": "image", "image": str(tmp_path / "1.png")}]
    append_messages(sample, [{"role": "user", "content": seen}], tokenizer, processor)
    assert sample.tokens[: len(before)] == before
    assert len(sample.image_spans) == len(sample.multimodal_inputs["images"]) == 2
    # All that was said, through the model's own processor at once; the template ends a turn with a line.
    text = tokenizer.decode(tokenizer.encode(sample.prompt, add_special_tokens=False))
    whole = (
        text + "look again<|im_end|>" + "<|im_start|>user\nzoomed: IMAGE<|im_end|>\n<|im_start|>assistant\n"
    )
    image = "<image>" if "<image>" in sample.prompt else "<|vision_start|><|image_pad|><|vision_end|>"
    expected = processor(
        text=[whole.replace("IMAGE", image)], **build_processor_kwargs(sample.multimodal_inputs)
    )
    assert sample.tokens == list(expected["input_ids"][0])
    assert torch.equal(sample.multimodal_train_inputs["pixel_values"], expected["pixel_values"])
    assert sample.loss_mask == [1] * len(written) + [0] * (len(sample.tokens) - len(before))
    append_with_images(sample, [10], [], processor)
    assert sample.tokens[-1] == 10
    again = without_response(sample)
    prepare_prompt(again, tokenizer, processor)
    assert again.tokens == before[: len(before) - len(written)] and len(again.image_spans) == 1
