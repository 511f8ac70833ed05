"""Samples without an advantage are left out of the backward pass, and a step is the same as with them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from trainer_helpers import trainer_args

from slime.backends.base import Layout
from slime.backends.fsdp import create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step import training_step
from slime.step.silent import set_apart
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample

REWARDS = [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.0, 1.0, 0.5)]
SOME = [True] * 3 + [False] * 6 + [True] * 3


def groups_of_samples(rewards):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, group in enumerate(rewards):
        prompt = torch.randint(4, 128, (5 + number,), generator=generator).tolist()
        for reward in group:
            length = 1 + len(samples) % 4
            answer = torch.randint(4, 128, (length,), generator=generator).tolist()
            sample = Sample(group_index=number, index=len(samples), tokens=prompt + answer)
            sample.response_length, sample.reward, sample.status = length, reward, Sample.Status.COMPLETED
            sample.rollout_log_probs = [-1.0] * length
            samples.append(sample)
    return samples


def args_of(folder, **changes):
    usual = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "n_samples_per_prompt": 3}
    return trainer_args(folder, **{**usual, "use_kl_loss": False, **changes})


def step_of(args, rewards):
    backend = create_backend(args, rank=0, world_size=1, device=torch.device("cpu"), random_weights=True)
    data = split_for_ranks(args, samples_to_batch(args, groups_of_samples(rewards)), 1)[0]
    reports = [TrainingStep(backend, args, number, data).run().summary for number in range(2)]
    return reports, {name: p.detach().clone() for name, p in backend.model.lm.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"use_dynamic_batch_size": False, "micro_batch_size": 3}])
@pytest.mark.parametrize("rewards", [REWARDS, [(1.0, 1.0, 1.0)] * 2])
def test_a_step_equals_one_with_backward_passes_of_all(model, changes, rewards, monkeypatch):
    args = args_of(model, **changes)
    passes, backward = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda value: passes.append(value) or backward(value))
    reports, weights = step_of(args, rewards)
    ours = len(passes)
    monkeypatch.setattr(training_step, "set_apart", lambda args, layout, batch, mbs: (mbs, [True] * len(mbs)))
    expected, expected_weights = step_of(args, rewards)
    assert ours < len(passes) - ours if rewards is REWARDS else ours == len(passes) - ours
    for ours_, theirs in zip(reports, expected, strict=True):
        named = {key for key in theirs if key.startswith("train/")}
        assert named == {key for key in ours_ if key.startswith("train/")}
        for key in named:
            assert ours_[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    for name, value in weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-4, atol=2e-6)


def batch_with_advantages(args):
    batch = samples_to_batch(args, groups_of_samples(REWARDS))
    pairs = zip(batch["response_lengths"], SOME, strict=True)
    batch["advantages"] = [torch.full((length,), float(some)) for length, some in pairs]
    return batch


def test_those_that_learn_come_first_and_no_micro_batch_grows():
    args = args_of("unused")
    batch = batch_with_advantages(args)
    given = [[0, 3, 6], [9, 1, 4], [7, 10], [2, 5, 8, 11]]
    made, learns = set_apart(args, Layout(), batch, given)
    assert sorted(p for members in made for p in members) == list(range(12))
    assert [[SOME[p] for p in members] for members in made] == [
        [own] * len(members) for own, members in zip(learns, made, strict=True)
    ]
    sizes = [len(tokens) for tokens in batch["tokens"]]
    assert max(sum(sizes[p] for p in m) for m in made) <= max(sum(sizes[p] for p in m) for m in given)
    assert len(made) <= len(given) + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"entropy_coef": 0.01},
        {"policy_loss_type": "sapo"},
        {"custom_policy_loss_function_path": "my.loss"},
    ],
)
def test_all_learn_where_a_loss_has_other_terms(changes):
    args = args_of("unused", **changes)
    given = [list(range(6)), list(range(6, 12))]
    assert set_apart(args, Layout(), batch_with_advantages(args), given) == (given, [True, True])


def test_all_learn_where_other_ranks_wait():
    args, given = args_of("unused"), [list(range(12))]
    assert set_apart(args, Layout(dp_size=2), batch_with_advantages(args), given) == (given, [True])


# The counter knows the attention kernels of GPUs only; that of a CPU has the same shapes.
_ATEN = torch.ops.aten
ATTENTION_ON_CPU = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}
LEARNS, SILENT = (1.0, 0.0, 1.0), (1.0, 1.0, 1.0)


def reported_and_done(args, rewards):
    """Operations of a training pass: as the report has them, and as torch counts its matrix products."""
    backend = create_backend(args, rank=0, world_size=1, device=torch.device("cpu"), random_weights=True)
    data = split_for_ranks(args, samples_to_batch(args, groups_of_samples(rewards)), 1)[0]
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU) as counter:
        report = TrainingStep(backend, args, 0, data).run().summary
    reported = report["perf/actor_train_tflops"] * report["perf/actor_train_time"] * 1e12
    return reported, counter.get_total_flops()


CASES = {
    "all samples learn": ([LEARNS] * 4, {"share_prefix": False}),
    "three groups of four teach nothing": ([LEARNS, SILENT, SILENT, SILENT], {"share_prefix": False}),
    "prompts are shared": ([LEARNS] * 4, {"share_prefix": True}),
    "adapters alone train": ([LEARNS] * 4, {"share_prefix": False, "lora_rank": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rate_of_a_training_pass_counts_what_torch_computed(model, case):
    rewards, changes = CASES[case]
    reported, done = reported_and_done(args_of(model, **changes), rewards)
    # On a CPU attention is computed without its causal half left out, and the matrices of adapters are small.
    assert 0.85 * done < reported <= done
