"""Micro-batches of equal work: within a rank, and where ranks wait for each other."""

import pytest
import torch
from trainer_helpers import trainer_args

from slime.batch.flops import typical_cost
from slime.batch.split import plan_steps


def waiting(by_flops):
    """Time of a step where every micro-batch waits for its slowest rank, over the mean work of a rank."""
    torch.manual_seed(0)
    lengths = torch.exp(6 + torch.randn(128)).clamp(16, 4096).long().tolist()
    args = trainer_args(
        "unused",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        balance_data=True,
        balance_by_flops=by_flops,
    )
    (step,) = plan_steps(args, lengths, list(range(128)), dp_size=4)
    assert sorted(step.positions) == list(range(128))
    assert all(sum(lengths[p] for p in mb) <= 8192 for rank in step.ranks for mb in rank)
    work = [[sum(typical_cost(lengths[p]) for p in mb) for mb in rank] for rank in step.ranks]
    return sum(max(column) for column in zip(*work, strict=True)) / (sum(map(sum, work)) / 4)


def test_heavy_micro_batches_of_all_ranks_meet():
    assert waiting(by_flops=False) < 1.3


def test_balance_by_flops_evens_micro_batches_out():
    assert waiting(by_flops=True) < min(1.02, waiting(by_flops=False))


@pytest.mark.parametrize("flags", [{}, {"balance_data": True}])
def test_no_micro_batch_is_left_with_what_the_others_had_no_room_for(flags):
    lengths = [400, 300, 300, 400, 300, 300, 10]  # two bins of 1,000 tokens, and ten
    args = trainer_args("unused", use_dynamic_batch_size=True, max_tokens_per_gpu=1000, **flags)
    (step,) = plan_steps(args, lengths, list(range(7)), dp_size=1)
    sizes = [sum(lengths[p] for p in micro_batch) for micro_batch in step.ranks[0]]
    assert len(sizes) == 3 and min(sizes) > 500 and max(sizes) <= 1000 and sum(sizes) == 2010
