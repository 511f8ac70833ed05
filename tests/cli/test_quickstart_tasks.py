"""The quick-start tasks keep training and held-out problems apart."""

import itertools
import re

from slime.cli.quickstart.tasks import ADDITION, HABITS, PHRASINGS, SORT_DIGITS, draw_habits


def first(problems, count):
    return list(itertools.islice(problems, count))


def sum_of(prompt):
    return frozenset(map(int, re.findall(r"\d+", prompt)))


def test_no_reordering_of_a_held_out_string_is_trained_on():
    held_out = {"".join(sorted(p.prompt)) for p in SORT_DIGITS.draw_held_out()}
    trained = first(SORT_DIGITS.draw_training(0), 5000) + first(draw_habits(0), 5000)
    assert held_out.isdisjoint("".join(sorted(p.prompt)) for p in trained)


def test_held_out_digit_strings_are_many_distinct_and_always_the_same():
    held_out = SORT_DIGITS.draw_held_out()
    assert len({p.prompt for p in held_out}) == len(held_out) >= 500
    assert held_out == SORT_DIGITS.draw_held_out()


def test_the_warm_up_shows_every_habit_equally_often():
    shown = first(draw_habits(0), 4000)
    for habit in HABITS.values():
        share = sum(p.label == habit(p.prompt.removesuffix(">")) for p in shown) / len(shown)
        assert 0.22 < share < 0.28


def test_the_four_habits_never_agree_on_an_answer():
    for problem in first(SORT_DIGITS.draw_training(1), 500):
        digits = problem.prompt.removesuffix(">")
        assert len({habit(digits) for habit in HABITS.values()}) == 4
        assert problem.label == "".join(sorted(digits))


def test_training_problems_depend_on_the_seed():
    assert first(SORT_DIGITS.draw_training(0), 20) == first(SORT_DIGITS.draw_training(0), 20)
    assert first(SORT_DIGITS.draw_training(0), 20) != first(SORT_DIGITS.draw_training(1), 20)


def test_neither_a_held_out_sum_nor_its_commuted_twin_is_trained_on():
    held_out = {sum_of(p.prompt) for p in ADDITION.draw_held_out()}
    trained = {sum_of(p.prompt) for p in first(ADDITION.draw_training(0), 2000)}
    assert held_out and trained and held_out.isdisjoint(trained)


def test_every_addition_is_held_out_or_trained_on_in_every_phrasing():
    held_out = {p.prompt for p in ADDITION.draw_held_out()}
    trained = {p.prompt for p in first(ADDITION.draw_training(0), 2000)}
    assert len(held_out | trained) == 11 * 11 * len(PHRASINGS)
    assert len(held_out) > 100


def test_the_label_of_an_addition_is_its_sum():
    for problem in ADDITION.draw_held_out():
        x, y = map(int, re.findall(r"\d+", problem.prompt))
        assert int(problem.label) == x + y
