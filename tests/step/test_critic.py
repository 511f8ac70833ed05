"""The critic beside a policy, on one process."""

import pytest
import torch
from step_helpers import PACKINGS, SGD, hf_model, plain_hidden, plain_log_probs, ppo_args
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.algorithms.gae import vanilla_gae
from slime.backends.base import NonFiniteStepError


def test_a_ppo_step_equals_the_obvious_computation_with_autograd(model):
    """GAE from the critic's values; the policy term and the clipped value error by plain autograd."""
    args = ppo_args(model, **SGD, critic_lr=0.5, critic_overrides={"clip_grad": 0.0}, micro_batch_size=3)
    samples = random_samples(2, 4)
    backend = backend_of(args)
    actor, critic = weights_of(backend), weights_of(backend.critic)
    metrics = train(backend, args, samples)

    policy, judge = hf_model(model), hf_model(model)
    head = torch.nn.Parameter(critic["lm_head.weight"].clone())
    policy_loss = value_loss = 0.0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask).bool()
        start = len(sample.tokens) - sample.response_length - 1
        values = (plain_hidden(judge, sample)[start:-1] @ head.T).squeeze(1)
        chosen = values[mask].detach()
        rewards = torch.zeros_like(chosen)
        rewards[-1] = sample.reward
        advantages, returns = (x[0] for x in vanilla_gae(rewards[None], chosen[None], 0.9, 0.8))
        log_probs = plain_log_probs(policy, sample)[mask]
        policy_loss = policy_loss - (torch.exp(log_probs - log_probs.detach()) * advantages).mean()
        value_loss = value_loss + (values[mask] - returns).square().mean()
    (policy_loss / len(samples)).backward()
    (value_loss / len(samples)).backward()
    assert metrics["train/critic-value_loss"] == pytest.approx(value_loss.item() / len(samples), rel=1e-5)
    after = weights_of(backend)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(actor[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)
    after = weights_of(backend.critic)
    torch.testing.assert_close(
        critic["lm_head.weight"] - after["lm_head.weight"], 0.5 * head.grad, rtol=1e-3, atol=1e-5
    )
    for name, parameter in judge.base_model.named_parameters():
        moved = critic[f"model.{name}"] - after[f"model.{name}"]
        torch.testing.assert_close(moved, 0.5 * parameter.grad, rtol=1e-3, atol=1e-5)


def test_values_do_not_depend_on_packing_and_neither_does_the_update(model):
    outcomes = []
    for packing in PACKINGS.values():
        args = ppo_args(model, **SGD, critic_overrides={"clip_grad": 0.0}, **packing)
        backend = backend_of(args)
        metrics = train(backend, args, random_samples(4, 4))
        outcomes.append((metrics, weights_of(backend), weights_of(backend.critic)))
    for metrics, actor, critic in outcomes[1:]:
        assert metrics["rollout/values"] == pytest.approx(outcomes[0][0]["rollout/values"], abs=1e-6)
        torch.testing.assert_close(actor, outcomes[0][1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(critic, outcomes[0][2], rtol=1e-5, atol=1e-5)


def test_the_critic_learns_and_moves_with_its_own_learning_rate(model):
    args = ppo_args(model, lr=0.0, critic_lr=1e-2, critic_lr_warmup_iters=2, micro_batch_size=8)
    backend = backend_of(args)
    actor = weights_of(backend)
    runs = [train(backend, args, random_samples(2, 4), rollout_id=i) for i in range(6)]
    assert [run["train/critic-lr-pg_0"] for run in runs[:3]] == [0.005, 0.01, 0.01]
    assert runs[-1]["train/critic-value_loss"] < 0.5 * runs[0]["train/critic-value_loss"]
    torch.testing.assert_close(weights_of(backend), actor, rtol=0, atol=0)


def test_only_the_critic_trains_in_its_first_rollouts(model):
    args = ppo_args(model, num_critic_only_steps=2, micro_batch_size=8)
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, random_samples(2, 4), rollout_id=1)
    assert "train/critic-value_loss" in metrics and "train/loss" not in metrics
    torch.testing.assert_close(weights_of(backend), before, rtol=0, atol=0)
    assert "train/loss" in train(backend, args, random_samples(2, 4), rollout_id=2)


def test_a_broken_step_of_the_critic_names_its_samples_and_may_be_skipped(model, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "def advantages(args, data):\n"
        "    data['advantages'] = [k.clone() for k in data['kl']]\n"
        "    data['returns'] = [k.clone() for k in data['kl']]\n"
        "    data['returns'][2][-1] = float('inf')\n"
    )
    changes = {
        "custom_advantage_function_path": f"{file}:advantages",
        "run_dir": str(tmp_path),
        "micro_batch_size": 8,
    }
    samples = random_samples(1, 4)
    samples[2].loss_mask = [1] * samples[2].response_length
    args = ppo_args(model, **changes)
    with pytest.raises(
        NonFiniteStepError, match=r"Samples with such terms: 2 \(returns, value_loss\); saved in "
    ):
        train(backend_of(args), args, samples)
    assert (tmp_path / "nonfinite" / "rollout_0_step_0_critic_rank_0.pt").is_file()
    args = ppo_args(model, **changes, nonfinite_action="skip")
    backend = backend_of(args)
    before = weights_of(backend.critic)
    assert train(backend, args, samples)["train/critic-nonfinite_steps"] == 1
    torch.testing.assert_close(weights_of(backend.critic), before, rtol=0, atol=0)


def test_a_critic_that_is_all_right_explains_the_variance_of_the_returns(model):
    args = ppo_args(model, lr=0.0, critic_lr=1e-2, micro_batch_size=8)
    backend = backend_of(args)
    runs = [train(backend, args, random_samples(2, 4), rollout_id=i) for i in range(30)]
    assert runs[0]["rollout/explained_variance"] < 0.3 < runs[-1]["rollout/explained_variance"] <= 1.0


def test_a_resumed_critic_continues_bit_for_bit(model, tmp_path):
    reference = dict(use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=1)
    args = ppo_args(model, critic_lr=1e-3, critic_lr_warmup_iters=5, **reference)
    first = backend_of(args)
    train(first, args, random_samples(2, 4, seed=1))
    first.save(tmp_path / "ckpt")
    expected = train(first, args, random_samples(2, 4, seed=2))
    second = backend_of(args)
    second.load(tmp_path / "ckpt")
    got = train(second, args, random_samples(2, 4, seed=2))
    for name in ("train/loss", "train/critic-value_loss", "train/critic-lr-pg_0", "train/critic-grad_norm"):
        assert got[name] == expected[name]
    torch.testing.assert_close(weights_of(second.critic), weights_of(first.critic), rtol=0, atol=0)


def test_a_checkpoint_without_critic_is_refused_unless_only_weights_are_taken(model, tmp_path):
    backend_of(trainer_args(model)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="has no critic"):
        backend_of(ppo_args(model)).load(tmp_path / "ckpt")
    backend_of(ppo_args(model, finetune=True)).load(tmp_path / "ckpt")


def test_a_critic_may_have_its_own_size_and_optimizer_but_not_another_vocabulary(model, tmp_path):
    small = make_tiny_model(tmp_path / "small", hidden=32, layers=3)
    args = ppo_args(
        model, critic_overrides={"hf_checkpoint": str(small), "weight_decay": 0.7}, critic_lr=1e-2
    )
    backend = backend_of(args)
    before = weights_of(backend.critic)
    train(backend, args)
    assert backend.critic.model.lm.config.hidden_size == 32
    assert {group["weight_decay"] for group in backend.critic.optimizer.param_groups} <= {0.7, 0.0}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(backend.critic).items())
    other = make_tiny_model(tmp_path / "other", vocab=130)
    with pytest.raises(ValueError, match=r"--critic-load .* has 130 tokens in its vocabulary"):
        backend_of(ppo_args(model, critic_load=str(other)))
