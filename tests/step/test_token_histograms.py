"""Histograms of the trained tokens of a step: ratios and entropies in fixed bins."""

import types

import torch
from trainer_helpers import trainer_args

from slime.backends.fsdp import create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.record.additions import BINS
from slime.step.token_terms import TokenWatch
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample


def micro_batch(mask, positions=(0,)):
    return types.SimpleNamespace(loss_mask=torch.tensor(mask), positions=positions)


def test_trained_tokens_are_counted_and_values_beyond_the_bins_at_the_ends():
    watch = TokenWatch()
    ratios = torch.tensor([1.0, 1.0, 0.8, 9.0, 0.1, 1.0])
    terms = {"ppo_kl": -ratios.log(), "entropy": torch.tensor([0.0, 0.3, 5.9, 9.0, 1.0, float("nan")])}
    watch.record(micro_batch([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]), terms)
    watch.record(micro_batch([1.0] * 6, positions=()), terms)  # weighs nothing
    found = watch.histograms()
    low, high, bins = BINS["ratio"]
    assert len(found["ratio"]) == bins and sum(found["ratio"]) == sum(found["entropy"]) == 5
    assert found["ratio"][10] == 2 and found["ratio"][0] == found["ratio"][-1] == 1
    assert low + 10 * (high - low) / bins < 1 < low + 11 * (high - low) / bins  # 1 is no edge
    assert found["ratio"][6] == 1 and found["entropy"][-1] == 2 and found["entropy"][0] == 1
    assert TokenWatch().histograms() == {}


def test_a_step_counts_every_trained_token_of_all_its_optimizer_steps(model):
    args = trainer_args(model, use_kl_loss=False, n_samples_per_prompt=3, global_batch_size=6)
    backend = create_backend(args, rank=0, world_size=1, device=torch.device("cpu"), random_weights=True)
    samples = []
    for index, reward in enumerate([1.0, 0.0, 1.0, 1.0, 1.0, 1.0] * 2):
        length = 1 + index % 4
        tokens, more = [5, 6, *range(7, 7 + length)], {"rollout_log_probs": [-1.0] * length}
        done = Sample.Status.COMPLETED
        sample = Sample(
            group_index=index // 3, index=index, tokens=tokens, status=done, reward=reward, **more
        )
        sample.response_length = length
        samples.append(sample)
    step = TrainingStep(backend, args, 0, split_for_ranks(args, samples_to_batch(args, samples), 1)[0])
    step.run()
    tokens = sum(sample.response_length for sample in samples)
    found = {name: sum(sum(part[name]) for part in step.histograms) for name in BINS}
    assert len(step.histograms) == 2 and found == {"ratio": tokens, "entropy": tokens}
