"""--advantage-estimator gdpo against an obvious version in float64: each component, then the batch."""

import random
import statistics

import pytest
from argument_helpers import parse
from rollout_helpers import make_args

from slime.batch.convert import post_process_rewards
from slime.utils.types import Sample

WEIGHTS = {"correct": 1.0, "format": 0.25}


def scored(groups=4, each=5):
    draw = random.Random(3)
    made = []
    for index in range(groups * each):
        parts = {"correct": float(draw.random() < 0.4), "format": draw.uniform(-20, 20), "unused": 7.0}
        total = sum(weight * parts[name] for name, weight in WEIGHTS.items())
        reward = {**parts, "weighted_sum": total}
        made.append(Sample(group_index=index // each, index=index, reward=reward, tokens=[1, 2]))
    return made


def slow(samples):
    sums = []
    for sample in samples:
        group = [other for other in samples if other.group_index == sample.group_index]
        total = 0.0
        for name, weight in WEIGHTS.items():
            numbers = [other.reward[name] for other in group]
            own = sample.reward[name] - statistics.fmean(numbers)
            total += weight * own / (statistics.stdev(numbers) + 1e-6) if len(set(numbers)) > 1 else 0.0
        sums.append(total)
    return [(total - statistics.fmean(sums)) / (statistics.stdev(sums) + 1e-6) for total in sums]


def arguments(tmp_path, *more):
    weights = '{"correct": 1, "format": 0.25}'
    return make_args(tmp_path, None, "--advantage-estimator", "gdpo", "--reward-weights", weights, *more)


def test_each_component_is_compared_by_itself(tmp_path):
    samples = scored()
    raw, advantages = post_process_rewards(arguments(tmp_path), samples, range(len(samples)))
    assert advantages == pytest.approx(slow(samples), abs=1e-12)
    assert raw == [sample.reward["weighted_sum"] for sample in samples]
    grpo = make_args(tmp_path, None, "--reward-weights", '{"correct": 1, "format": 0.25}')
    together = post_process_rewards(grpo, samples, range(len(samples)))[1]
    assert max(abs(a - b) for a, b in zip(advantages, together, strict=True)) > 0.1


def test_a_sample_without_a_component_is_named(tmp_path):
    samples = scored()
    del samples[7].reward["format"]
    with pytest.raises(ValueError, match="sample 7 has no component 'format'"):
        post_process_rewards(arguments(tmp_path), samples, range(len(samples)))


def test_flags_that_change_the_sum_alone_are_refused():
    weights = ("--advantage-estimator", "gdpo", "--reward-weights", '{"a": 1}')
    with pytest.raises(ValueError, match="name the components with --reward-weights"):
        parse("--advantage-estimator", "gdpo")
    with pytest.raises(ValueError, match="--overlong-buffer-len changes the sum"):
        parse(*weights, "--overlong-buffer-len", "5")
    with pytest.raises(ValueError, match="--turn-discount changes the sum"):
        parse(*weights, "--turn-discount", "0.5")
