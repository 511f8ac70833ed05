"""Training over recorded parts of the vocabulary against brute force in float64:
log-probs, entropy, KL and the step taken.
"""

import copy

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import random_samples, trainer_args, with_nuclei

from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("process_group")

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, hidden=32)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other") / "tiny", layers=1, hidden=32, seed=7)


def double_model(path):
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return lm.double()


def brute_force(lm, sample):
    """[R] log-probs and entropies, one token at a time, each a softmax over its own ids and nothing else."""
    logits = lm(torch.tensor(sample.tokens)[None]).logits[0] / TEMPERATURE
    first = len(sample.tokens) - sample.response_length
    log_probs, entropies = [], []
    for t in range(sample.response_length):
        ids = list(range(logits.shape[1]))
        if (bounds := sample.rollout_top_p_token_offsets) is not None and bounds[t] < bounds[t + 1]:
            ids = sample.rollout_top_p_token_ids[bounds[t] : bounds[t + 1]]
        dist_ = torch.log_softmax(logits[first + t - 1, ids], 0)
        log_probs.append(dist_[ids.index(sample.tokens[first + t])])
        entropies.append(-(dist_.exp() * dist_).sum())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("packing", [[[0, 1, 2, 3], [4, 5]], [[5], [3, 0], [], [4, 2, 1]]])
@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_log_probs_and_entropy_are_over_the_recorded_ids(model, packing, chunk_size):
    samples = with_nuclei(random_samples(3, 2))
    args = trainer_args(model, rollout_temperature=TEMPERATURE, log_probs_chunk_size=chunk_size)
    backend = create_backend(args, rank=0, world_size=1, device="cpu")
    found = backend.log_probs(build_micro_batches(samples_to_batch(args, samples), packing), entropy=True)
    lm = double_model(model)
    with torch.no_grad():
        for i, sample in enumerate(samples):
            expected = brute_force(lm, sample)
            torch.testing.assert_close(found.log_probs[i].double(), expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.entropy[i].double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_a_step_is_that_of_the_objective_over_the_recorded_ids(model, other_model, max_tokens):
    samples = with_nuclei(random_samples(3, 4))
    args = trainer_args(
        model,
        ref_load=str(other_model),
        rollout_temperature=TEMPERATURE,
        optimizer="sgd",
        lr=0.3,
        weight_decay=0.0,
        clip_grad=0.0,
        entropy_coef=0.05,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type="k3",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=max_tokens,
    )
    backend = create_backend(args, rank=0, world_size=1, device="cpu")
    batch = samples_to_batch(args, samples)
    metrics = TrainingStep(backend, args, 0, split_for_ranks(args, batch, 1)[0]).run().summary

    policy, reference = double_model(model), double_model(other_model)
    before = copy.deepcopy(policy.state_dict())
    total = 0.0
    for sample, advantage in zip(samples, batch["rewards"], strict=True):
        log_probs, entropy = brute_force(policy, sample)
        with torch.no_grad():
            expected, _ = brute_force(reference, sample)
        ratio = (log_probs - log_probs.detach()).exp()  # one step on the policy's own samples
        difference = expected - log_probs
        terms = -advantage * ratio - 0.05 * entropy + 0.2 * (difference.exp() - difference - 1)
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        total = total + (terms * mask).sum() / mask.sum() / len(samples)
    total.backward()
    assert metrics["train/loss"] == pytest.approx(total.item(), abs=1e-6)
    moved = 0.0
    for name, parameter in policy.named_parameters():
        found = gather_full(dict(backend.model.lm.named_parameters())[name].data).double()
        torch.testing.assert_close(found, before[name] - 0.3 * parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
        moved = max(moved, (found - before[name]).abs().max().item())
    assert moved > 1e-3


def test_supervised_losses_are_of_the_whole_vocabulary(model):
    args = trainer_args(model, loss_type="sft_loss")
    assert "rollout_top_p_token_ids" not in samples_to_batch(args, with_nuclei(random_samples(2, 2)))
