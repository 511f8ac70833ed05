"""A difference of engine and trainer that grows from push to push is
told, below the threshold that stops a run.
"""

import pytest

from slime.step.difference_trend import DifferenceTrend, Drift

TOKENS = 10_000


def told(readings: list[float], threshold: float = 0.2, num_tokens: int = TOKENS) -> list[Drift | None]:
    trend = DifferenceTrend()
    return [trend.note(version, value, num_tokens, threshold) for version, value in enumerate(readings, 1)]


def test_a_drift_that_a_threshold_lets_pass_is_told_with_its_numbers():
    """As measured with FP8 engines that missed small updates; the threshold was 0.4."""
    found = told([0.038, 0.21, 0.30, 0.37], threshold=0.4)
    assert found == [None, None, Drift(0.038, 0.30, 2), Drift(0.038, 0.37, 3)]


@pytest.mark.parametrize(
    "readings",
    [
        [0.006, 0.0055, 0.0062, 0.007, 0.0065, 0.006],  # 16 bit
        [0.072, 0.069, 0.061, 0.058, 0.044, 0.037],  # FP8 from a 16-bit start
        [0.045, 0.055, 0.052, 0.051, 0.041, 0.036],  # FP8, rounded stochastically
        [1e-7, 0.0045, 0.0042, 0.0044],  # rounding that begins with the first update
        [0.006, 0.09, 0.006, 0.09, 0.006],  # odd batches, none after another
    ],
)
def test_what_does_not_grow_is_not_told(readings):
    assert set(told(readings)) == {None}


def test_few_tokens_tell_nothing_and_a_version_counts_once():
    assert set(told([0.01, 0.1, 0.1, 0.1], num_tokens=20)) == {None}
    trend = DifferenceTrend()
    assert trend.note(1, 0.01, TOKENS, 0.2) is None
    assert [trend.note(2, 0.15, TOKENS, 0.2) for _ in range(3)] == [None] * 3
