"""Training and generation with videos as frames: what transformers computes, and engine and trainer alike."""

import json

import numpy as np
import pytest
import torch
from argument_helpers import parse
from tiny_vision import make_picture, make_vision_folder, make_vision_model
from trainer_helpers import backend_of, init_process_group, trainer_args

from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.data.dataset import Dataset
from slime.engines.sglang import rules as sglang_rules
from slime.rollout.generation.generate_request import prepare_prompt
from slime.rollout.generation.sample_images import wire_form
from slime.utils.media.image_tokens import ImageEncoder, encoder_of
from slime.utils.media.pictures import Video, open_media, picture_key
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FPS = 1.5


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    init_process_group()
    return make_vision_model(tmp_path_factory.mktemp("vlm") / request.param, request.param)


def clip(seed, count, width=64, height=48):
    return Video(tuple(make_picture(seed + i, width, height) for i in range(count)), FPS)


# The media of each prompt; the second has a picture too, and the last is text alone.
SHOWN = ((clip(0, 4),), (clip(10, 5), make_picture(3), clip(20, 2, 40, 120)), (make_picture(4),), ())


def video_samples(model):
    encoder = encoder_of(load_processor(str(model)))
    video_id = load_processor(str(model)).video_token_id
    samples = []
    for number, media in enumerate(SHOWN):
        ids = [70 + number, 71]
        for item in media:
            ids += [video_id if isinstance(item, Video) else encoder.image_token_id, 72]
        made = encoder.encode_prompt(ids, media)
        for offset in (0, 1):
            sample = Sample(
                group_index=number, index=len(samples), tokens=[*made.ids, *range(80, 85 + offset)]
            )
            sample.response_length, sample.reward = 5 + offset, float(offset)
            sample.multimodal_train_inputs = made.inputs
            samples.append(sample)
    return samples


def reference(model, samples):
    """Log-probs by transformers' own forward, with pictures and videos apart as its processor has them."""
    from transformers import AutoModelForImageTextToText

    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    depth = lm.config.vision_config.temporal_patch_size
    found = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[None]
        kinds = (tokens == lm.config.image_token_id).int() + 2 * (tokens == lm.config.video_token_id).int()
        media, given = {"mm_token_type_ids": kinds}, sample.multimodal_train_inputs
        shown = SHOWN[sample.group_index]
        if given is not None:
            is_video = [isinstance(item, Video) for item in shown]
            parts = torch.split(given["pixel_values"], given["image_grid_thw"].prod(-1).tolist())
            for name, wanted in (("image", False), ("video", True)):
                chosen = [place for place, video in enumerate(is_video) if video is wanted]
                if chosen:
                    pixels = "pixel_values" + ("_videos" if wanted else "")
                    media[pixels] = torch.cat([parts[place] for place in chosen])
                    media[f"{name}_grid_thw"] = given["image_grid_thw"][chosen]
            if any(is_video):
                media["second_per_grid_ts"] = torch.tensor([depth / FPS] * sum(is_video))
        with torch.no_grad():
            logits = lm(input_ids=tokens, use_cache=False, **media).logits[0].float()
        table = torch.log_softmax(logits[-sample.response_length - 1 : -1], -1)
        found.append(table.gather(1, tokens[0, -sample.response_length :, None])[:, 0])
    return found


def worst(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_packed_documents_with_videos_are_those_of_transformers(model):
    backend = backend_of(trainer_args(model))
    samples = video_samples(model)
    batch = samples_to_batch(backend.args, samples)
    expected = reference(model, samples)
    for parts in ([list(range(len(samples)))], [[0, 5], [2], [7, 3], [6, 1, 4]]):
        order = [p for part in parts for p in part]
        found = backend.log_probs(build_micro_batches(batch, parts)).log_probs
        assert worst([found[i] for i in range(len(order))], expected) < 2e-5


def test_frames_are_steps_of_two_and_the_last_fills_up(model):
    processor = load_processor(str(model))
    encoder = encoder_of(processor)
    frames = [make_picture(seed) for seed in (1, 2, 3)]
    made = encoder.encode(Video(tuple(frames), 2.0))
    alone = [encoder.encode(frame).tensors["pixel_values"].unflatten(1, (3, 2, -1)) for frame in frames]
    steps = made.tensors["pixel_values"].unflatten(1, (3, 2, -1)).chunk(2)
    assert made.tensors["image_grid_thw"].tolist()[0][0] == 2
    for step, (first, second) in zip(steps, ((0, 1), (2, 2)), strict=True):
        assert torch.equal(step[:, :, 0], alone[first][:, :, 0])
        assert torch.equal(step[:, :, 1], alone[second][:, :, 1])
    tokens = processor.tokenizer.decode(made.ids)
    per_step = made.num_features // 2
    if "qwen3" in str(model):
        step = "<|vision_start|>" + "<|video_pad|>" * per_step + "<|vision_end|>"
        assert tokens == f"<0.2 seconds>{step}<1.0 seconds>{step}"  # between 0 and 0.5, and at 1
    else:
        assert tokens == "<|video_pad|>" * per_step * 2
        assert made.tensors["second_per_grid_ts"].tolist() == [1.0]


@pytest.mark.parametrize(("family", "side"), [("qwen2_5_vl", 112), ("qwen3_vl", 128)])
def test_frames_that_keep_their_size_are_those_of_the_video_processor(tmp_path, family, side):
    """Its own part for videos, which needs torchvision, makes the same ids and pixels."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        pytest.skip("torchvision cannot be loaded")
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(make_vision_folder(tmp_path, family))
    frames = [make_picture(seed, side, side) for seed in range(5)]
    made = ImageEncoder(processor).encode(Video(tuple(frames), 2.0))
    pixels = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in frames])
    facts = {"fps": 2.0, "total_num_frames": 5, "frames_indices": list(range(5)), "duration": 2.5}
    options = {"do_sample_frames": False, "video_metadata": [facts], "return_tensors": "pt"}
    options["size"] = {"shortest_edge": 32 * 32, "longest_edge": 10**7}
    found = processor(text=[processor.video_token], videos=[pixels], videos_kwargs=options)
    assert list(found["input_ids"][0]) == list(made.ids)
    assert torch.equal(found["video_grid_thw"], made.tensors["image_grid_thw"])
    assert torch.allclose(found["pixel_values_videos"], made.tensors["pixel_values"], atol=1e-6)


def test_rows_with_videos_become_samples_and_requests_that_the_engine_reads(model, tmp_path):
    from slime.engines.embedded.request_images import ImageReader

    for number in range(3):
        make_picture(number).save(tmp_path / f"{number}.png")
    frames = [str(tmp_path / f"{number}.png") for number in range(3)]
    row = {"input": "<video>and <image>?", "videos": frames, "images": [frames[2]]}
    rows = [row, row | {"videos": [{"video": frames, "fps": FPS}]}, row | {"videos": [frames[:2]]}]
    tokenizer, processor = load_tokenizer(str(model)), load_processor(str(model))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = Dataset(
        str(path),
        tokenizer,
        processor,
        None,
        prompt_key="input",
        multimodal_keys={"image": "images", "video": "videos"},
        apply_chat_template=True,
    )
    plain, timed, short = data.samples
    args = trainer_args(model)
    from transformers import AutoConfig

    reader = ImageReader(encoder_of(processor), AutoConfig.from_pretrained(model))
    for sample, count, fps in ((plain, 3, 2.0), (timed, 3, FPS), (short, 2, 2.0)):
        video = sample.multimodal_inputs["images"][0]
        assert (len(video.frames), video.fps) == (count, fps)
        prepare_prompt(sample, tokenizer, processor)
        ids, media, forbidden = wire_form(args, sample)
        assert forbidden == {processor.image_token_id, processor.video_token_id}
        read = reader.read(ids, list(media))
        assert read.ids == sample.tokens and len(read.images) == 2
        restored = Sample.from_dict(sample.to_dict())
        assert picture_key(restored.multimodal_inputs["images"][0]) == picture_key(video)
    assert plain.multimodal_train_input_id != timed.multimodal_train_input_id


def test_the_engine_says_what_the_trainer_says_of_videos(model):
    from slime.engines.embedded.engine import Engine
    from slime.engines.embedded.generate_json import RequestLimits, RequestReader
    from slime.engines.embedded.request_images import ImageReader
    from slime.engines.embedded.runner import ModelRunner
    from slime.engines.embedded.text import Detokenizer
    from slime.utils.media.pictures import media_url

    runner = ModelRunner(str(model), device="cpu", dtype="float32", max_running=8, max_total_tokens=4096)
    engine = Engine(runner, Detokenizer.load(str(model)), max_running=8)
    processor = load_processor(str(model))
    encoder = encoder_of(processor)
    limits = RequestLimits(runner.vocab_size, runner.context_len, engine.max_tokens, frozenset({2}))
    reader = RequestReader(limits, engine.detokenizer, 0, ImageReader(encoder, runner.model.config))
    engine.scheduler.prefill_budget = 7  # cuts videos into chunks
    sequences = []
    for number, media in enumerate(SHOWN):
        ids = [70 + number, 71]
        for item in media:
            ids += [processor.video_token_id if isinstance(item, Video) else encoder.image_token_id, 72]
        sampling = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": number}
        body = {"input_ids": ids, "image_data": [media_url(item) for item in media] or None}
        sequences += reader.read(body | {"sampling_params": sampling, "return_logprob": True})[0]
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work:
        engine.step()
    backend = backend_of(trainer_args(model))
    samples = video_samples(model)[::2]
    for sample, sequence in zip(samples, sequences, strict=True):
        assert sample.tokens[: len(sequence.prompt)] == sequence.prompt
        sample.tokens, sample.response_length = [*sequence.prompt, *sequence.output], len(sequence.output)
    mbs = build_micro_batches(samples_to_batch(backend.args, samples), [[0, 1, 2, 3]])
    own = backend.log_probs(mbs).log_probs
    assert worst(own, [torch.tensor(sequence.log_probs) for sequence in sequences]) < 1e-4


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"type": "video", "video": "clip.mp4"}, "no list of frames.*ffmpeg"),
        ({"type": "video", "video": ["clip.mp4"]}, "a frame of a video.*ffmpeg"),
        ({"type": "video", "video": [make_picture(0)], "fps": -1}, "fps of a video is -1"),
    ],
)
def test_what_is_no_video_is_refused_in_words(item, why):
    with pytest.raises(ValueError, match=why):
        open_media(item)


def test_frames_of_different_sizes_are_refused(model):
    frames = Video((make_picture(0), make_picture(1, 100, 70)))
    with pytest.raises(ValueError, match="different sizes"):
        encoder_of(load_processor(str(model))).encode(frames)


def test_families_and_engines_without_videos_refuse_them(tmp_path):
    keys = '{"video": "videos"}'
    smol = make_vision_folder(tmp_path / "smol", "smolvlm")
    with pytest.raises(
        ValueError, match=r"smolvlm reads no videos here; qwen2_5_vl, qwen3_vl, qwen3_vl_moe do"
    ):
        parse(hf_checkpoint=str(smol), multimodal_keys=keys, rollout_engine="embedded")
    assert sglang_rules.lacks_images_of("qwen3_vl", videos=True)
    assert not sglang_rules.lacks_images_of("qwen3_vl")
    qwen = make_vision_folder(tmp_path / "qwen", "qwen3_vl")
    assert parse(
        hf_checkpoint=str(qwen), multimodal_keys=keys, rollout_engine="embedded", apply_chat_template=True
    )
