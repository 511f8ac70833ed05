"""The embedded engine with images: log-probs are the trainer's, whatever is cached, cut or pushed."""

import base64

import pytest
import torch
from engine_under_test import EngineUnderTest, start_engine
from tiny_vision import FAMILIES, make_picture, make_vision_model
from trainer_helpers import backend_of, init_process_group, trainer_args

from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.engines.embedded.adapter import scale_of
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.generate_json import BadRequest, RequestLimits, RequestReader, answer_json
from slime.engines.embedded.request_images import ImageReader
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.text import Detokenizer
from slime.engines.embedded.weight_update import GroupSource
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError
from slime.utils.media.image_tokens import encoder_of
from slime.utils.media.pictures import picture_url
from slime.utils.processing_utils import load_processor
from slime.utils.types import Sample
from slime.wire.protocol import GenerateRequest, SamplingParams


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vlm") / request.param, request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vlm") / "qwen3_vl", "qwen3_vl")


def make_engine(folder, *, max_running=8, max_total_tokens=4096):
    runner = ModelRunner(
        str(folder), device="cpu", dtype="float32", max_running=max_running, max_total_tokens=max_total_tokens
    )
    engine = Engine(runner, Detokenizer.load(str(folder)), max_running=max_running)
    encoder = encoder_of(load_processor(str(folder)))
    limits = RequestLimits(runner.vocab_size, runner.context_len, engine.max_tokens, frozenset({2}))
    reader = RequestReader(limits, engine.detokenizer, 0, ImageReader(encoder, runner.model.config))
    return engine, reader, encoder


PROMPTS = ((0,), (1, 2), (), (0, 3), (0,))  # seeds of the pictures of each prompt
SIZES = ((64, 48), (100, 70), (40, 120), (64, 64))


def pictures(seeds):
    return [make_picture(seed, *SIZES[seed]) for seed in seeds]


def prompt_ids(encoder, seeds, number=0):
    ids = [70 + number, 71, 72]
    for _ in seeds:
        ids += [encoder.image_token_id, 73, 74]
    return ids


def body(encoder, seeds, number=0, **more):
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": number}
    data = [picture_url(p) for p in pictures(seeds)] or None
    ids = prompt_ids(encoder, seeds, number)
    return {"input_ids": ids, "image_data": data, "sampling_params": sampling, "return_logprob": True, **more}


def run_all(engine, sequences):
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work or engine.scoring:
        engine.step()
    failed = [s.finish for s in sequences if s.failed]
    assert not failed
    assert engine.allocator.num_free == engine.allocator.num_blocks


def trainer_log_probs(backend, encoder, sequences, all_seeds):
    samples = []
    for index, (sequence, seeds) in enumerate(zip(sequences, all_seeds, strict=True)):
        made = encoder.encode_prompt(prompt_ids(encoder, seeds, 0), pictures(seeds))
        assert len(made.ids) == len(sequence.prompt)
        sample = Sample(index=index, tokens=[*sequence.prompt, *sequence.output], reward=0.0, group_index=0)
        sample.response_length, sample.multimodal_train_inputs = len(sequence.output), made.inputs
        samples.append(sample)
    batch = samples_to_batch(backend.args, samples)
    return backend.log_probs(build_micro_batches(batch, [list(range(len(samples)))])).log_probs


def worst(found, sequences):
    pairs = zip(found, sequences, strict=True)
    return max(float((own - torch.tensor(s.log_probs)).abs().max()) for own, s in pairs)


def test_log_probs_are_the_trainers_also_after_a_push_to_both_towers(model):
    init_process_group()
    backend = backend_of(trainer_args(model))
    engine, reader, encoder = make_engine(model)
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for parameter in backend.model.lm.parameters():
                    parameter.mul_(1.1).add_(0.01)
            sent = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
            engine.update_weights(GroupSource(sent), "run:1")
        sequences = [s for n, seeds in enumerate(PROMPTS) for s in reader.read(body(encoder, seeds, n))[0]]
        run_all(engine, sequences)
        assert worst(trainer_log_probs(backend, encoder, sequences, PROMPTS), sequences) < 1e-4
        # Four distinct pictures, each through the tower once for each set of weights.
        assert engine.runner.features.num_computed == 4 * (version + 1)


def test_log_probs_are_the_trainers_after_a_push_of_adapters(model):
    init_process_group()
    backend = backend_of(trainer_args(model, lora_rank=4))
    engine, reader, encoder = make_engine(model)
    with torch.no_grad():
        for name, parameter in backend.model.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    for number in (1, 2):
        sent = {name: tensor.clone() for bucket in backend.export_adapter() for name, tensor in bucket}
        if number == 1:
            engine.update_adapter(GroupSource(sent), scale_of(backend.adapter_config()), "policy", "run:1")
        else:
            sent = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
            engine.update_weights(GroupSource(sent), "run:2")
        sequences = [s for n, seeds in enumerate(PROMPTS) for s in reader.read(body(encoder, seeds, n))[0]]
        run_all(engine, sequences)
        assert worst(trainer_log_probs(backend, encoder, sequences, PROMPTS), sequences) < 1e-4


def test_chunks_that_cut_images_and_retractions_change_nothing(model):
    roomy, reader, encoder = make_engine(model)
    bodies = [body(encoder, seeds, n) for n, seeds in enumerate(PROMPTS)]
    expected = [s for one in bodies for s in reader.read(one)[0]]
    run_all(roomy, expected)
    tight, reader, _ = make_engine(model, max_total_tokens=160)
    tight.scheduler.prefill_budget = 5
    sequences = [s for one in bodies for s in reader.read(one)[0]]
    run_all(tight, sequences)
    assert [s.output for s in sequences] == [s.output for s in expected]
    pairs = zip(expected, sequences, strict=True)
    assert max(abs(a - b) for x, y in pairs for a, b in zip(x.log_probs, y.log_probs, strict=True)) < 1e-4


def test_a_prefix_is_shared_with_the_same_picture_and_never_with_another(model):
    engine, reader, encoder = make_engine(model)
    # Long enough that whole pages follow the image.
    ids = [*[71] * 20, encoder.image_token_id, *[72] * 40]
    first, second = make_picture(0), make_picture(5)

    def ask(picture):
        request = {"input_ids": ids, "image_data": picture_url(picture), "return_logprob": True}
        sequences, _ = reader.read({**request, "sampling_params": {"max_new_tokens": 4, "sampling_seed": 1}})
        run_all(engine, sequences)
        return sequences[0]

    one, again, other = ask(first), ask(first), ask(second)
    assert one.cached_tokens == 0
    assert again.cached_tokens > 40
    assert other.cached_tokens == 16
    assert (
        again.output == one.output
        and max(abs(a - b) for a, b in zip(one.log_probs, again.log_probs, strict=True)) < 1e-5
    )
    fresh, reader, _ = make_engine(model)
    engine = fresh
    assert ask(second).log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_an_input_with_images_is_scored(qwen):
    init_process_group()
    engine, reader, encoder = make_engine(qwen)
    request = body(encoder, (1, 2)) | {"logprob_start_len": 0}
    request["sampling_params"] = {"max_new_tokens": 0}
    (sequence,), _ = reader.read(request)
    run_all_scored(engine, sequence)
    backend = backend_of(trainer_args(qwen))
    sample = Sample(
        index=0, tokens=sequence.prompt, response_length=len(sequence.prompt) - 1, reward=0.0, group_index=0
    )
    sample.multimodal_train_inputs = encoder.encode_prompt(
        prompt_ids(encoder, (1, 2)), pictures((1, 2))
    ).inputs
    own = backend.log_probs(build_micro_batches(samples_to_batch(backend.args, [sample]), [[0]])).log_probs[0]
    assert (own - torch.tensor(sequence.input_log_probs[1:])).abs().max() < 1e-4


def run_all_scored(engine, sequence):
    engine.add(sequence)
    engine.step()
    assert sequence.finish == {"type": "length", "length": 0}


def test_image_tokens_are_never_drawn(qwen):
    engine, reader, encoder = make_engine(qwen)
    head = engine.runner.model.get_output_embeddings().weight
    with torch.no_grad():
        head[encoder.image_token_id] = 40 * head[0]
        head[0] = -40 * head[1]
    sequences, _ = reader.read(body(encoder, (0,)) | {"sampling_params": {"max_new_tokens": 30, "n": 4}})
    run_all(engine, sequences)
    assert not any(encoder.image_token_id in s.output for s in sequences)


def test_ids_that_are_expanded_already_and_batches_are_understood(qwen):
    engine, reader, encoder = make_engine(qwen)
    collapsed = reader.read(body(encoder, (1, 2)))[0][0]
    expanded = body(encoder, (1, 2)) | {"input_ids": collapsed.prompt}
    assert reader.read(expanded)[0][0].prompt == collapsed.prompt
    one, two = body(encoder, (0,)), body(encoder, (1, 2))
    batch = {
        "input_ids": [one["input_ids"], two["input_ids"]],
        "image_data": [one["image_data"], two["image_data"]],
    }
    made, is_list = reader.read({**batch, "sampling_params": {"max_new_tokens": 2}})
    assert is_list and [len(s.pictures.images) for s in made] == [1, 2]
    bare = one["image_data"][0].partition(",")[2]
    assert reader.read(one | {"image_data": bare})[0][0].prompt == made[0].prompt
    run_all(engine, made)
    assert answer_json(made[1], engine.detokenizer)["meta_info"]["prompt_tokens"] == len(collapsed.prompt)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image_data": None}, "1 image tokens .* for 0 images"),
        ({"image_data": ["x", "y"]}, "image_data"),
        ({"image_data": ["data:image/png;base64," + base64.b64encode(b"text").decode()]}, "known kind"),
        ({"image_data": ["/etc/hostname"]}, "engines read no files and addresses"),
        ({"image_data": [7]}, "must be text"),
        ({"image_data": ["http://127.0.0.1:1/a.png"]}, "engines read no files and addresses"),
    ],
)
def test_wrong_images_are_refused_in_words(qwen, change, why):
    _, reader, encoder = make_engine(qwen)
    with pytest.raises(BadRequest, match=why):
        reader.read(body(encoder, (0,)) | change)


def test_images_go_over_http_and_weights_of_both_towers_are_pushed(tmp_path):
    """Qwen2.5-VL, whose names on the hub are others than in memory."""
    model = make_vision_model(tmp_path / "m", "qwen2_5_vl")
    init_process_group()
    backend = backend_of(trainer_args(model))
    encoder = encoder_of(load_processor(str(model)))
    with start_engine(model, tmp_path, "--device", "cpu", "--max-total-tokens", "4096") as (
        url,
        process,
        _,
        prefix,
    ):
        engine = EngineUnderTest(url, model, process.pid, prefix)
        request = GenerateRequest(
            prompt_ids(encoder, (1, 2)),
            SamplingParams(max_new_tokens=8, ignore_eos=True, sampling_seed=3),
            rid="r",
            image_data=tuple(picture_url(p) for p in pictures((1, 2))),
        )
        for version in (0, 1):
            if version:
                with torch.no_grad():
                    for parameter in backend.model.lm.parameters():
                        parameter.mul_(0.9)
                state = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
                with engine.published(state, "run:1") as (manifest, _):
                    engine.post("update_weights_from_shared_memory", manifest.to_json())
            answer = run(engine.client.generate(request))
            made = encoder.encode_prompt(prompt_ids(encoder, (1, 2)), pictures((1, 2)))
            sample = Sample(
                index=0,
                tokens=[*made.ids, *answer.ids],
                response_length=len(answer.ids),
                reward=0.0,
                group_index=0,
            )
            sample.multimodal_train_inputs = made.inputs
            batch = samples_to_batch(backend.args, [sample])
            own = backend.log_probs(build_micro_batches(batch, [[0]])).log_probs[0]
            assert answer.prompt_tokens == len(made.ids)
            assert (own - torch.tensor(answer.log_probs)).abs().max() < 1e-4
        with pytest.raises(HttpError, match="1 image tokens"):
            engine.post("generate", {"input_ids": [encoder.image_token_id], "sampling_params": {}})
