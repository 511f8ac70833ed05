"""A step in which no token trains changes nothing: not the weights, not
the optimizer's moments, not the schedule.
"""

import logging

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args

from slime.backends.base import TOKENS_LEFT, Denominators, Loss, has_update

REJECT_ALL = """
import torch

def weights(*, args, pg_loss, loss_masks, **_):
    return pg_loss, [torch.zeros_like(mask) for mask in loss_masks], {}

def loss(args, batch, logits, reduce):
    return logits.square().mean() * len(batch["tokens"]), {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=1)


def without_trained_tokens(samples):
    for sample in samples:
        sample.loss_mask = [0] * sample.response_length
    return samples


def state_of(backend):
    """All that a step may move: weights, moments, how many steps were taken; of the critic too."""
    parts = [p.detach().clone() for p in backend.model.parameters()]
    parts += [value.clone() for state in backend.optimizer.state.values() for value in state.values()]
    own = [*parts, torch.tensor(backend.step)]
    return own + (state_of(backend.critic) if backend.critic is not None else [])


WARM = dict(lr=1e-2, weight_decay=0.5, lr_decay_style="linear", lr_decay_iters=8)
SETTINGS = {
    "grpo": {},
    "whitened": dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, gamma=0.9),
    "token mean": dict(loss_reduction="token_mean", calculate_per_token_loss=True),
    "critic": dict(advantage_estimator="ppo", critic_lr=1e-2),
    "entropy and kl": dict(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"),
    "weights": dict(use_tis=True),
    "sft": dict(loss_type="sft_loss"),
    "sgd": dict(optimizer="sgd"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_without_trained_tokens_leaves_everything_as_it_was(model, setting, caplog):
    args = trainer_args(model, **(WARM | SETTINGS[setting]), micro_batch_size=4)
    backend = backend_of(args)
    train(backend, args, random_samples(2, 4))
    before = state_of(backend)
    with caplog.at_level(logging.WARNING):
        metrics = train(backend, args, without_trained_tokens(random_samples(2, 4, seed=1)))
    torch.testing.assert_close(state_of(backend), before, rtol=0, atol=0)
    assert metrics["train/empty_steps"] == 1 and metrics["train/grad_norm"] == 0
    assert metrics.get("train/critic-empty_steps", 0) == (setting == "critic")
    assert "no token trains, every loss mask is 0" in caplog.text
    after = train(backend, args, random_samples(2, 4, seed=2))
    assert "train/empty_steps" not in after and backend.step == 2


def test_only_the_empty_step_of_a_rollout_is_left_out(model):
    args = trainer_args(model, **WARM, global_batch_size=4)
    samples = random_samples(4, 2)
    for sample in samples:
        sample.reward = float(sample.index % 2)
    without_trained_tokens(samples[:4])
    backend = backend_of(args)
    assert train(backend, args, samples)["train/empty_steps"] == 1 and backend.step == 1


OUT_OF_BOUNDS = dict(tis_clip_low=0.99, tis_clip=1.01)
REJECTED = {
    "plug-in masks": dict(use_tis=True, custom_tis_function_path="OWN:weights"),
    "icepop": dict(use_tis=True, tis_mode="mask", **OUT_OF_BOUNDS),
    "icepop plug-in": dict(
        use_tis=True, custom_tis_function_path="slime.algorithms.off_policy.icepop_function", **OUT_OF_BOUNDS
    ),
    "rejection": dict(use_rs=True, rs_upper=1.01, rs_lower=0.99),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_step_whose_tokens_are_all_rejected_leaves_everything_as_it_was(model, tmp_path, name, caplog):
    (tmp_path / "own.py").write_text(REJECT_ALL)
    changes = {
        k: str(v).replace("OWN", f"{tmp_path}/own.py") if "path" in k else v
        for k, v in REJECTED[name].items()
    }
    plain = trainer_args(model, **WARM)
    backend = backend_of(plain)
    train(backend, plain, random_samples(2, 4))
    before = state_of(backend)
    metrics = train(backend, trainer_args(model, **WARM, **changes), random_samples(2, 4, seed=1))
    torch.testing.assert_close(state_of(backend), before, rtol=0, atol=0)
    assert metrics["train/empty_steps"] == 1 and "every one was rejected" in caplog.text
    # Where another term still trains the tokens, the step is applied.
    entropy = trainer_args(model, **WARM, **(changes | {"custom_tis_function_path": None}), entropy_coef=0.1)
    assert "train/empty_steps" not in train(backend, entropy, random_samples(2, 4, seed=1))


def test_advantages_of_zero_are_a_step_like_any_other(model):
    args = trainer_args(model, **WARM, use_tis=True)
    backend = backend_of(args)
    samples = random_samples(2, 4)
    for sample in samples:
        sample.reward = 1.0
    metrics = train(backend, args, samples)
    assert metrics["train/grad_norm"] == 0 and "train/empty_steps" not in metrics and backend.step == 1


def test_a_loss_that_does_not_read_the_masks_trains_without_them(model, tmp_path):
    (tmp_path / "own.py").write_text(REJECT_ALL)
    own = dict(loss_type="custom_loss", custom_loss_function_path=f"{tmp_path}/own.py:loss")
    args = trainer_args(model, **WARM, **own, compute_advantages_and_returns=False)
    backend = backend_of(args)
    metrics = train(backend, args, without_trained_tokens(random_samples(1, 2)))
    assert "train/empty_steps" not in metrics and backend.step == 1


@pytest.mark.parametrize(
    ("tokens", "left", "grad_norm", "masked", "expected"),
    [
        (3, 3.0, 0.1, True, True),
        (3, 3.0, 0.0, True, True),  # advantages of 0
        (3, None, 0.0, True, True),  # a loss that leaves nothing out
        (3, 0.0, 0.0, True, False),  # all rejected
        (3, 0.0, 0.1, True, True),  # all rejected, but KL or entropy train them
        (0, 0.0, 0.0, True, False),
        (0, 0.0, 0.1, True, False),  # a router's balance alone
        (0, None, 0.1, False, True),  # a loss that does not read the masks
    ],
)
def test_an_update_needs_a_token_that_trains(tokens, left, grad_norm, masked, expected):
    loss = Loss(lambda out, mb: (None, {}), masked=masked)
    metrics = {} if left is None else {TOKENS_LEFT: left}
    assert has_update(loss, Denominators(1, tokens), metrics, grad_norm) is expected
