"""Environments that show pictures: a real engine reads what the trainer is given."""

from types import SimpleNamespace

import pytest
import torch
from engine_under_test import served_by_embedded
from fake_engine import FakeEngine
from rollout_helpers import make_args
from tiny_vision import make_vision_model
from trainer_helpers import backend_of, init_process_group, trainer_args

from slime.agent.environments.episode import generate
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.types import Sample


def play(folder, engine, name, *flags):
    own = ("--env", f"environments_under_test:{name}", "--rollout-max-response-len", "900", *flags)
    args = make_args(
        folder,
        engine,
        *own,
        "--turn-max-response-len",
        "12",
        "--custom-rm-path",
        "x.y",
        max_context_len=1500,
        vocab_size=300,
    )
    args.custom_rm_path = None
    sample = Sample(index=1, group_index=0, prompt="")
    return run(generate(args, sample, {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 900}))


def test_pictures_of_observations_train_with_the_log_probs_of_the_engine(tmp_path):
    model = make_vision_model(tmp_path / "model", "qwen2_5_vl")
    with served_by_embedded(model, tmp_path / "engine.log") as (control, _, _):
        engine = SimpleNamespace(url=control.url, port=int(control.url.rpartition(":")[2]))
        sample = play(tmp_path, engine, "Gallery", "--apply-chat-template")
    assert sample.reward_failure is None and sample.metadata["agent"]["turns"] == 3
    assert sum(sample.loss_mask) == 36
    assert len(sample.image_spans) == len(sample.multimodal_inputs["images"]) == 3
    start = len(sample.tokens) - sample.response_length
    assert sample.image_spans[0][1] <= start <= sample.image_spans[1][0], "two came later"
    assert all(
        sum(sample.loss_mask[first - start : last - start]) == 0 for first, last in sample.image_spans[1:]
    )
    init_process_group()
    backend = backend_of(trainer_args(model))
    (own,) = backend.log_probs(build_micro_batches(samples_to_batch(backend.args, [sample]), [[0]])).log_probs
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    assert float((own - torch.tensor(sample.rollout_log_probs))[mask].abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("bytes", "invalid image"), ("places", "1 images and 2 times <image>"), ("alone", "a tuple of them")],
)
def test_what_an_environment_shows_wrongly_is_a_failure_with_its_name_and_never_a_score(
    tmp_path, wrong, said
):
    make_vision_model(tmp_path / "model", "qwen2_5_vl")
    options = ("--env-args", f'{{"*": {{"wrong": "{wrong}"}}}}', "--apply-chat-template")
    with FakeEngine() as engine:
        sample = play(tmp_path, engine, "WrongGallery", *options)
    assert sample.reward is None and said in str(sample.reward_failure)
    assert "WrongGallery" in str(sample.reward_failure)


def test_a_model_that_reads_text_only_ends_the_run_with_the_reason(tmp_path):
    with FakeEngine() as engine, pytest.raises(RunStopped, match="takes none: qwen3"):
        play(tmp_path, engine, "Gallery", "--apply-chat-template")


def test_columns_of_images_are_refused_with_an_environment(tmp_path):
    with FakeEngine() as engine, pytest.raises(ValueError, match="has an effect only without --env"):
        play(tmp_path, engine, "Gallery", "--multimodal-keys", '{"image": "images"}')
