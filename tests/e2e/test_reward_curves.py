"""How benchmarks compare reward curves: a curve that is late is found to be, by as many steps."""

import importlib.util
import math
import random
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "curves.py"


@pytest.fixture(scope="module")
def curves():
    spec = importlib.util.spec_from_file_location("curves", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learning(late: float, seed: int, *, noise: float = 0.005) -> list[float]:
    draw = random.Random(seed)
    return [0.5 + 0.5 / (1 + math.exp((12 + late - k) / 4)) + draw.gauss(0, noise) for k in range(30)]


@pytest.mark.parametrize("late", [-1.5, 0.0, 0.6, 2.0])
def test_the_shift_of_a_curve_is_found(curves, late):
    plain = [learning(0.0, seed) for seed in range(3)]
    found = curves.compare(plain, [learning(late, seed) for seed in range(3, 6)])
    assert found.behind == pytest.approx(late, abs=0.25)
    assert all(shift == pytest.approx(late, abs=0.5) for shift in found.behind_each)
    assert all(abs(shift) < 0.5 for shift in found.plain_each)


def test_a_late_start_is_told_from_slow_learning(curves):
    def made(late: float, slower: float) -> list[list[float]]:
        return [[learning(late, seed)[min(29, round(k / slower))] for k in range(30)] for seed in range(3)]

    late = curves.compare(made(0, 1), made(2, 1))
    assert late.begins[1] == pytest.approx([step + 2 for step in late.begins[0]], abs=1)
    assert late.rises[1] == pytest.approx(late.rises[0], abs=1)
    slow = curves.compare(made(0, 1), made(0, 1.25))
    assert slow.rises[1] == pytest.approx([1.25 * rise for rise in slow.rises[0]], abs=1)


def test_a_level_that_is_never_reached_is_no_number(curves):
    assert math.isnan(curves.passes([0.1] * 5, 0.5))


def test_a_difference_is_told_in_spreads_between_seeds(curves):
    plain = [[level] * 4 for level in (0.4, 0.5, 0.6)]
    found = curves.compare(plain, [[0.7] * 4, [0.7] * 4])
    assert found.spread == pytest.approx(0.1) and found.step_spread == pytest.approx(0.1)
    assert found.difference == pytest.approx(0.2)
    assert found.difference_in_spreads == pytest.approx(2.0)


def test_one_seed_has_no_spread(curves):
    with pytest.raises(ValueError, match="two seeds or more"):
        curves.compare([learning(0.0, 0)], [learning(0.0, 1)])
