"""Preference pairs: DPO and reward models, on one process."""

import pytest
import torch
import torch.nn.functional as F
from step_helpers import PACKINGS, SGD, hf_model, plain_hidden, plain_log_probs, ppo_args
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep


def random_pairs(num_pairs=4, seed=0, margin=None):
    """Groups of two answers to one prompt: the first is the preferred one."""
    samples = random_samples(num_pairs, 2, seed=seed)
    for sample in samples:
        sample.rollout_id = sample.group_index
        sample.reward = 1.0 - sample.index % 2
        sample.rollout_log_probs = None
        sample.train_metadata = None if margin is None else {"margin": margin}
    return samples


def test_a_dpo_step_equals_the_obvious_computation_with_autograd(model, tmp_path):
    reference = make_tiny_model(tmp_path / "ref", seed=5)
    args = trainer_args(
        model,
        loss_type="dpo_loss",
        ref_load=str(reference),
        dpo_beta=0.3,
        **SGD,
        micro_batch_size=4,
    )
    samples = random_pairs()
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    policy, ref = hf_model(model), hf_model(reference)

    def log_ratio(sample):
        mask = torch.tensor(sample.loss_mask).float()
        return ((plain_log_probs(policy, sample) - plain_log_probs(ref, sample).detach()) * mask).sum()

    margins = torch.stack(
        [0.3 * (log_ratio(a) - log_ratio(b)) for a, b in zip(samples[::2], samples[1::2], strict=True)]
    )
    loss = -F.logsigmoid(margins).mean()
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert metrics["train/margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    after = weights_of(backend)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_reward_model_step_equals_the_obvious_computation_with_autograd(model):
    args = trainer_args(model, loss_type="rm_loss", **SGD, micro_batch_size=4)
    samples = random_pairs(margin=0.25)
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    lm = hf_model(model)
    head = torch.nn.Parameter(before["lm_head.weight"].clone())
    scores = torch.stack([(plain_hidden(lm, sample)[-1] @ head.T).squeeze() for sample in samples])
    loss = -F.logsigmoid(scores[::2] - scores[1::2] - 0.25).mean()
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = weights_of(backend)
    torch.testing.assert_close(
        before["lm_head.weight"] - after["lm_head.weight"], head.grad, rtol=1e-3, atol=1e-5
    )
    for name, parameter in lm.base_model.named_parameters():
        moved = before[f"model.{name}"] - after[f"model.{name}"]
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["dpo_loss", "rm_loss"])
def test_pairs_stay_together_and_packing_changes_nothing(model, loss_type):
    outcomes = []
    for packing in PACKINGS.values():
        args = trainer_args(model, loss_type=loss_type, **SGD, global_batch_size=3, **packing)
        batch = samples_to_batch(args, random_pairs(num_pairs=6))
        data = split_for_ranks(args, batch, 1)[0]
        for step in data.steps:
            for micro_batch in step.micro_batches:
                ids = [data.batch["rollout_ids"][p] for p in micro_batch]
                assert all(ids.count(i) == 2 for i in ids)
        backend = backend_of(args)
        metrics = TrainingStep(backend, args, 0, data).run().summary
        outcomes.append((metrics, weights_of(backend)))
    for metrics, weights in outcomes[1:]:
        torch.testing.assert_close(weights, outcomes[0][1], rtol=1e-5, atol=1e-5)
        assert metrics["train/loss"] == pytest.approx(outcomes[0][0]["train/loss"], rel=1e-5)


def test_samples_that_are_no_pairs_are_one_error(model):
    args = trainer_args(model, loss_type="rm_loss")
    samples = random_pairs(2)
    samples[0].reward = samples[1].reward
    with pytest.raises(ValueError, match="are no pair"):
        train(backend_of(args), args, samples)


def test_a_reward_model_learns_and_its_folder_is_a_sequence_classification(model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    args = trainer_args(model, loss_type="rm_loss", lr=1e-3, micro_batch_size=8)
    backend = backend_of(args)
    samples = random_pairs()
    runs = [train(backend, args, samples) for _ in range(8)]
    assert runs[-1]["train/accuracy"] == 1.0 and runs[-1]["train/loss"] < runs[0]["train/loss"] - 0.1
    backend.save_hf(tmp_path / "rm")
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    with torch.no_grad():
        scores = [judge(torch.tensor(s.tokens)[None]).logits.item() for s in samples]
    margin = sum(a - b for a, b in zip(scores[::2], scores[1::2], strict=True)) / len(samples) * 2
    critic = backend_of(ppo_args(model, critic_load=str(tmp_path / "rm"))).critic
    torch.testing.assert_close(weights_of(critic), weights_of(backend), rtol=0, atol=0)
    assert train(backend, args, samples)["train/margin"] == pytest.approx(margin, rel=1e-4)
