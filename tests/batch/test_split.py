"""Steps, ranks and micro-batches: nothing lost, siblings together, equal counts, caps kept, work balanced."""

import logging
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import random_samples, trainer_args

from slime.batch.convert import samples_to_batch
from slime.batch.flops import typical_cost
from slime.batch.packing import balance, pack_first_fit
from slime.batch.split import plan_steps, split_for_ranks, take


def args(**changes):
    return trainer_args("unused", **changes)


batches = st.lists(st.tuples(st.integers(2, 50), st.integers(0, 6)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())
def test_every_sample_is_in_exactly_one_micro_batch_and_ranks_agree(pairs, dp_size, gbs, dynamic, balanced):
    lengths, rollout_ids = [n for n, _ in pairs], [r for _, r in pairs]
    settings_ = args(
        use_dynamic_batch_size=dynamic,
        max_tokens_per_gpu=64,
        micro_batch_size=3,
        global_batch_size=gbs,
        balance_data=balanced,
    )
    steps = plan_steps(settings_, lengths, rollout_ids, dp_size=dp_size)
    seen = [p for step in steps for p in step.positions]
    assert sorted(seen) == list(range(len(pairs)))
    for step in steps:
        assert len({len(micro_batches) for micro_batches in step.ranks}) == 1
        assert step.num_rollouts == len({rollout_ids[p] for p in step.positions}) <= gbs
        for micro_batch in (mb for rank in step.ranks for mb in rank):
            assert not dynamic or len(micro_batch) <= 1 or sum(lengths[p] for p in micro_batch) <= 64
            assert dynamic or len(micro_batch) <= 3
    step_of = {p: i for i, step in enumerate(steps) for p in step.positions}
    for rollout in set(rollout_ids):
        assert len({step_of[p] for p, r in enumerate(rollout_ids) if r == rollout}) == 1


def test_a_remainder_becomes_a_short_step_and_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        steps = plan_steps(args(global_batch_size=4), [5] * 10, list(range(10)), dp_size=1)
    assert [step.num_rollouts for step in steps] == [4, 4, 2]
    assert "the last of 3 optimizer steps has 2 rollouts" in caplog.text


def test_first_fit_fills_bins_and_gives_an_oversized_item_its_own():
    assert pack_first_fit([5, 4, 3, 2], 7) == [[0, 3], [1, 2]]
    assert pack_first_fit([9, 1], 7) == [[0], [1]]


def test_balance_is_near_even_on_long_tailed_work():
    generator = random.Random(0)
    costs = [generator.lognormvariate(6, 1) for _ in range(256)]
    totals = [sum(costs[i] for i in part) for part in balance(costs, 8)]
    assert max(totals) / (sum(totals) / 8) < 1.01
    assert balance([1.0], 3) == [[0], [], []]


def test_balanced_ranks_have_nearly_equal_work():
    generator = random.Random(1)
    lengths = [min(int(generator.lognormvariate(6, 1)) + 2, 4000) for _ in range(256)]
    settings_ = args(use_dynamic_batch_size=True, max_tokens_per_gpu=8192, balance_data=True)
    steps = plan_steps(settings_, lengths, list(range(256)), dp_size=8)
    work = [sum(typical_cost(lengths[p]) for mb in rank for p in mb) for rank in steps[0].ranks]
    assert max(work) / (sum(work) / 8) <= 1.05


def test_split_gives_each_rank_its_samples_and_the_counts_of_the_whole_step():
    batch = samples_to_batch(args(), random_samples(3, 4))
    batch["extra"] = [f"s{i}" for i in range(12)]
    batch["constant"] = {"a": 1}
    shares = split_for_ranks(args(micro_batch_size=2, global_batch_size=8), batch, 2)
    assert sorted(i for share in shares for i in share.batch["sample_indices"]) == list(range(12))
    tokens = 0.0
    for share in shares:
        assert [step.num_rollouts for step in share.steps] == [8, 4]
        assert share.batch["extra"] == [f"s{i}" for i in share.batch["sample_indices"]]
        assert share.batch["constant"] == {"a": 1}
        tokens = sum(step.num_tokens for step in share.steps)
    assert tokens == sum(float(mask.sum()) for mask in batch["loss_masks"])


def test_a_rank_without_samples_gets_micro_batches_of_weight_zero():
    batch = samples_to_batch(args(), random_samples(1, 1))
    shares = split_for_ranks(args(), batch, 2)
    assert shares[0].steps[0].micro_batches == [[0]]
    assert shares[1].steps[0].micro_batches == [[]]
    assert shares[1].batch["tokens"] == []


def test_take_slices_tensors_too():
    import torch

    batch = {"tokens": [1, 2, 3], "x": torch.arange(3), "y": 5}
    assert take(batch, [2, 0])["x"].tolist() == [2, 0]
