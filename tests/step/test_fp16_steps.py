"""--dtype float16: the loss is scaled, an overflow skips the step, and a resumed run is exact."""

import logging

import pytest
import torch
from argument_helpers import parse
from step_helpers import SGD, hf_model, plain_log_dist
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.backends.base import NonFiniteStepError
from slime.backends.fsdp.loss_scale import LossScale


def fp16_args(model, **changes):
    return trainer_args(model, dtype="float16", loss_type="sft_loss", micro_batch_size=3, **SGD, **changes)


def test_a_step_in_fp16_is_that_of_float64_to_its_rounding(model):
    samples = random_samples(2, 4)
    plain = hf_model(model).double()
    total = 0.0
    for sample in samples:
        tokens = torch.tensor(sample.tokens[-sample.response_length :])
        mask = torch.tensor(sample.loss_mask).double()
        nll = -plain_log_dist(plain, sample).gather(1, tokens[:, None])[:, 0]
        total = total + (nll * mask).sum() / mask.sum()
    (total / len(samples)).backward()
    backend = backend_of(fp16_args(model))
    before = weights_of(backend)
    metrics = train(backend, backend.args, samples)
    assert metrics["train/loss"] == pytest.approx(total.item() / len(samples), rel=1e-3)
    assert metrics["train/loss_scale"] == 2.0**16 and "train/skipped_steps" not in metrics
    after = weights_of(backend)
    for name, parameter in plain.named_parameters():
        difference = (before[name] - after[name]).double() - parameter.grad
        assert difference.norm() < 5e-3 * parameter.grad.norm(), name


def test_a_gradient_that_overflows_skips_the_step_and_halves_the_scale(model, tmp_path, caplog):
    backend = backend_of(fp16_args(model))
    samples = random_samples(2, 4)
    train(backend, backend.args, samples)
    backend.loss_scale.size = 2.0**60
    before, step = weights_of(backend), backend.step
    with caplog.at_level(logging.WARNING):
        metrics = train(backend, backend.args, samples)
    assert metrics["train/skipped_steps"] == 1 and "train/empty_steps" not in metrics
    assert metrics["train/loss_scale"] == 2.0**60 and backend.loss_scale.state == (2.0**59, 0)
    torch.testing.assert_close(weights_of(backend), before, rtol=0, atol=0)
    assert backend.step == step and "overflowed in fp16 at loss scale 1.15292e+18" in caplog.text
    # The scale is part of the checkpoint.
    backend.loss_scale = LossScale((2.0**9, 1998))
    backend.save(tmp_path / "saved")
    resumed = backend_of(fp16_args(model))
    resumed.load(tmp_path / "saved")
    for one in (backend, resumed):
        scales = [train(one, one.args, samples)["train/loss_scale"] for _ in range(3)]
        assert scales == [2.0**9, 2.0**9, 2.0**10] and one.loss_scale.state == (2.0**10, 1)
    torch.testing.assert_close(weights_of(resumed), weights_of(backend), rtol=0, atol=0)


def test_at_the_least_scale_a_gradient_that_is_not_finite_is_an_error_of_the_step(model):
    scale = LossScale((1.0, 5))
    assert not scale.update(float("inf")) and scale.state == (1.0, 5)
    backend = backend_of(fp16_args(model))
    backend.loss_scale = LossScale((1.0, 0))
    backend._square_of_gradients = lambda: torch.tensor(torch.inf, dtype=torch.float64)
    with pytest.raises(NonFiniteStepError, match="grad_norm=inf"):
        train(backend, backend.args, random_samples(2, 4))


def test_what_cannot_train_in_fp16_says_so():
    assert parse("--dtype", "float16").dtype == "float16"
    for words, message in (
        (("--train-backend", "megatron"), "this trainer does not scale the loss"),
        (("--fp8-training",), "--dtype float16 with --fp8-training"),
    ):
        with pytest.raises(ValueError, match=message):
            parse("--dtype", "float16", *words)
