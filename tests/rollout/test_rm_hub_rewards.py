"""The built-in rewards on hand-checked answers."""

import asyncio

import pytest
from argument_helpers import declared

from slime.rollout.rm_hub import RewardConfigError, async_rm
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.expressions import expressions_equal, parse_expression
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import (
    compute_score,
    is_correct_minerva,
    is_correct_strict_box,
    normalize_final_answer,
    verify,
)
from slime.rollout.rm_hub.math_dapo_utils import remove_boxed as dapo_remove_boxed
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.rollout.rm_hub.workers.check_pool import close_pools
from slime.utils.types import RewardFailure, Sample


def make_args(**changes):
    return declared(**{"timeouts": {"reward": 20.0, "generate": 30.0}, **changes})


def reward(rm_type, response, label=None, **metadata):
    return asyncio.run(
        async_rm(
            make_args(rm_type=rm_type), Sample(index=7, response=response, label=label, metadata=metadata)
        )
    )


@pytest.fixture(scope="module", autouse=True)
def _no_workers_left():
    yield
    close_pools()


# Boxes
def test_last_box_wins_and_braces_nest():
    text = r"first \boxed{1}, then \boxed{\frac{1}{2}} done"
    assert last_boxed_only_string(text) == r"\boxed{\frac{1}{2}}"
    assert extract_answer(text) == r"\frac{1}{2}"


def test_unclosed_box_falls_back_to_the_last_complete_one():
    assert extract_answer(r"\boxed{3} and \boxed{4") == "3"
    assert extract_answer(r"only \boxed{4") is None


def test_box_without_braces_and_fbox_are_read():
    assert remove_boxed(last_boxed_only_string(r"$\boxed 7$ is it")) == "7"
    assert extract_answer(r"\fbox{8}") == "8"
    assert remove_boxed("7") is None and remove_boxed(None) is None


# Grading
@pytest.mark.parametrize(
    "given, truth",
    [
        ("1/2", r"\frac{1}{2}"),
        (".5", r"\frac12"),
        ("408", "408.0"),
        ("(1,2)", "(1, 2)"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("x+1", "1+x"),
        (r"\dfrac{x^2-1}{x-1}", "x+1"),
        ("1,000", "1000"),
        ("x=5", "5"),
        (r"30^\circ", "30"),
        (r"2\frac{3}{4}", "11/4"),
        ("2.75", "2 3/4"),
        (r"\text{Monday}", "Monday"),
        ("(x+1)(x-1)", "x^2-1"),
        (r"5\text{ cm}", "5"),
        (r"\left(0, \frac{1}{2}\right)", "(0,0.5)"),
        ("1{,}000", "1000"),
        ("−3", "-3"),
        ("–3", "-3"),
        ("+7", "7"),
        ("{7}", "7"),
        (r"\(7\)", "7"),
        (r"\displaystyle 7", "7"),
        (r"\mathbf{7}", "7"),
        (r"\boxed{\textbf{7}}", "7"),
        (r"7\quad", "7"),
        (r"7~\text{cm}", "7"),
        (r"5 \text{ cm}^2", "5"),
        ("7 apples", "7"),
        ("90°", "90"),
        (r"\frac{-1}{2}", r"-\frac12"),
        (r"\text{Yes}", "yes"),
        (r"\textbf{(C)}", "C"),
        (r"x \in [1,2]", "[1,2]"),
    ],
)
def test_equal_answers_are_recognised(given, truth):
    assert grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


@pytest.mark.parametrize(
    "given, truth",
    [
        ("12*34", "408"),  # the unevaluated question is no answer
        ("2/4", "1/2"),
        ("(1,2]", "(1,2)"),
        ("(1,2)", "(1,2,3)"),
        ("2 3/4", "23/4"),
        ("0.333", "1/3"),
        ("1/0", "2"),
        ("9^{9^{9}}", "3"),
        ("__import__('os').getcwd()", "3"),
        ("", "3"),
        (r"\text{}", r"\text{cm}"),
        ("B", "b"),
        (r"\text{Tuesday}", "Monday"),
    ],
)
def test_different_answers_are_told_apart(given, truth):
    assert not (grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth))


def test_expressions_are_parsed_not_evaluated():
    with pytest.raises(ValueError):
        parse_expression("().__class__")
    assert expressions_equal(r"\frac{\pi}{2}+\sqrt[3]{8}", "2+pi/2")
    assert expressions_equal("50%", "1/2") and not expressions_equal("50%", "50")


def test_verl_grading_reads_boxes_on_both_sides():
    assert grade_answer_verl(r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}")
    assert not grade_answer_verl("so 1/2", "1/2")
    assert not grade_answer_verl(r"\boxed{1}", "")


def test_normalising_none_is_none():
    assert mathd_normalize_answer(None) is None


# math
@pytest.mark.parametrize(
    "response, label, score",
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (r"\boxed{3}", "4", 0),
        ("the answer is 5", "5", 0),  # not boxed
        (r"\boxed{5}", 5, 1),  # a number as label
        (r"\boxed{90°}", "90", 1),
        (r"\boxed{1 \times 10^6}", "1000000", 1),
        (r"\boxed{-0}", "0", 1),
        (r"\boxed{12 \times 34}", "408", 0),  # the unevaluated question is no answer
        (r"\boxed{(3+4)}", "7", 0),
    ],
)
def test_math_compares_boxed_answers(response, label, score):
    assert reward("math", response, label) == score


def test_math_without_label_is_invalid_not_zero():
    failure = reward("math", r"\boxed{5}")
    assert isinstance(failure, RewardFailure) and "--label-key" in failure.reason


def test_math_without_its_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr("slime.rollout.rm_hub.hub.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardConfigError, match=r"pip install 'slime-rl\[math\]'"):
        reward("math", r"\boxed{5}", "5")


# deepscaler
@pytest.mark.parametrize(
    "response, label, score",
    [
        (r"<think>hm</think> \boxed{\frac{1}{2}}", "0.5", 1),
        (r"###Response \boxed{3}", ["4", r"\boxed{3}"], 1),
        (r"<think> \boxed{3}", "3", 0),  # never stopped thinking
        (r"<think>\boxed{3}</think> it is three", "3", 0),  # boxed only in the thoughts
        (r"</think> \boxed{3}", "4", 0),
        (r"</think> \boxed{3}", 3, 1),
    ],
)
def test_deepscaler_wants_a_boxed_answer_after_the_thinking(response, label, score):
    assert get_deepscaler_rule_based_reward(response, label) == score


def test_deepscaler_runs_through_the_hub():
    assert reward("deepscaler", r"</think> \boxed{2\sqrt{3}}", r"\sqrt{12}") == 1


# dapo
@pytest.mark.parametrize(
    "text, normal",
    [
        ("x = 34", "34"),
        ("$34$", "34"),
        ("1,234", "1234"),
        (r"\boxed{7}", "7"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("12 dollars", "12"),
        ("45 degrees.", "45"),
        (r"\text{7}", "7"),
        ("**9**", "9"),
        ("−3", "-3"),
        ("1{,}000", "1000"),
        ("+7.0", "7"),
        ("-0.50", "-0.5"),
        ("7.", "7"),
        (r"\(34\)", "34"),
        (r"$\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\mathbf{34}", "34"),
        ("1,23,4", "1,23,4"),  # three numbers
    ],
)
def test_dapo_normalises_final_answers(text, normal):
    assert normalize_final_answer(text) == normal


def test_dapo_scores_plus_or_minus_one_with_prediction():
    assert compute_score("Thus.\nAnswer: $34$", 34) == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score("Thus.\nAnswer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert compute_score("no line", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_dapo_takes_float_labels_of_whole_numbers_and_keeps_fractions():
    assert compute_score("Answer: 34", 34.0)["acc"]
    assert compute_score("Answer: 0.5", "0.5")["acc"]
    assert not compute_score("Answer: 12", "1,2")["acc"]
    assert not compute_score(r"Answer: \text{}", r"\text{cm}")["acc"]


def test_graders_that_are_called_directly_take_special_tokens_off_the_end():
    assert compute_score("so\nAnswer: 42<|im_end|>", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert compute_score("Answer: 42</s>\n", "42")["acc"] and verify("Answer: 42<|eot_id|>", "42")[0]
    assert is_correct_minerva("Answer: 42<|im_end|>", "42") == (True, "42")
    assert f1_score("42<|im_end|>", "42") == (1.0, 1.0, 1.0)
    assert compute_gpqa_reward("B<|im_end|>", "B") == 1.0


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("n", "n!", False),
        ("n!", "n!", True),
        ("$n!$.", "n!", True),
        ("n!", "n", False),
        ("5", "5!", False),
        ("5!", "5!", True),
        ("(n-1)", "(n-1)!", False),
        ("(n-1)!", "(n-1)!", True),
        ("42!", "42", True),  # an exclamation
        ("(3,4)!", "(3,4)", True),
        ("B!", "B", True),
        ("1e3", "1000", True),
        ("x<=3", r"x\le 3", True),
        (r"\mathrm{e}^2", "e^2", True),
    ],
)
def test_dapo_tells_factorials_from_exclamations_and_knows_common_signs(answer, label, right):
    assert compute_score(f"so\nAnswer: {answer}", label)["acc"] is right


SIGNS = [
    ("1e3", "1000", True),
    ("1000", "1e3", True),
    ("1.5e-3", "0.0015", True),
    ("1e4", "1000", False),
    (r"x\le 3", r"x\leq 3", True),
    ("x ≤ 3", r"x\le 3", True),
    (r"x\geqslant 3", r"x\ge 3", True),
    (r"x\ge 3", r"x\le 3", False),
    ("x<3", r"x\le 3", False),
    (r"\mathrm{e}^2", "e^2", True),
    ("e^{2}", r"\mathrm{e}^{2}", True),
    (r"2\mathrm{e}^{2}", "2e^2", True),
    (r"\mathrm{e}^2", r"\mathrm{e}^3", False),
    (r"\mathrm{m}^2", r"\mathrm{e}^2", False),
    (r"2+3\mathrm{i}", "2+3i", True),
    (r"\pi\mathrm{i}", r"\pi{i}", True),
    (r"5\mathrm{cm}^2", "5", True),
]


@pytest.mark.parametrize(("answer", "label", "right"), SIGNS)
def test_signs_that_mean_the_same_are_equal(answer, label, right):
    from slime.rollout.rm_hub.math_check import check_math

    boxed = f"\\boxed{{{answer}}}"
    assert check_math(boxed, label) == right
    assert get_deepscaler_rule_based_reward(f"</think>{boxed}", label) == right
    assert grade_answer_verl(boxed, label) is right


def test_dapo_uses_the_last_answer_within_the_tail():
    assert compute_score("Answer: 1\nAnswer: 2", "2")["acc"]
    assert not compute_score("Answer: 2\n" + "x" * 400, "2")["acc"]


def test_dapo_reference_may_be_a_solution():
    assert is_correct_minerva("Answer: 5", r"so \boxed{5}", gt_need_extract=True) == (True, "5")


def test_dapo_strict_box_wants_the_exact_box_near_the_end():
    assert is_correct_strict_box(r"\boxed{5}", "5") == (1, "5")
    assert is_correct_strict_box(r"\boxed{5}" + "x" * 100, "5") == (-1, None)
    assert verify(r"Answer: 5", "5", strict_box_verify=True) == (False, None)
    with pytest.raises(ValueError):
        dapo_remove_boxed("5")


# f1
def test_f1_is_the_harmonic_mean_of_word_overlap():
    assert normalize_answer("The  Cat, sat!") == "cat sat"
    f1, precision, recall = f1_score("a cat sat down", "the cat")
    assert (precision, recall) == (1 / 3, 1.0)
    assert f1 == pytest.approx(0.5)


def test_f1_counts_repeated_words_once_per_occurrence():
    assert f1_score("cat cat cat", "cat")[1] == pytest.approx(1 / 3)


def test_f1_gives_no_partial_credit_for_yes_or_no():
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert f1_score("Yes.", "yes")[0] == 1.0
    assert f1_score(None, "yes") == f1_score("", "cat") == (0.0, 0.0, 0.0)


# gpqa
CHOICES = ["Mercury", "Venus", "Earth", "Mars"]


@pytest.mark.parametrize(
    "response, score",
    [
        ("The answer is (C).", 1.0),
        ("Answer: **C**", 1.0),
        (r"Hence \boxed{C}", 1.0),
        (r"Hence \boxed{\text{C}}", 1.0),
        ("Reasoning about A...\nC", 1.0),
        ("Maybe (A), but no: (C)", 1.0),
        ("The answer is A. Wait. The answer is C", 1.0),
        ("<think>The answer is C</think>The answer is B", 0.0),
        ("I would say Earth.", 1.0),
        ("Earth or Mars", 0.0),
        ("c", 1.0),
        ("the answer is c.", 1.0),
        ("**Answer:** **C**", 1.0),
        ('The answer is "C"', 1.0),
        ("The answer should be C", 1.0),
        ("The correct answer is therefore option C", 1.0),
        ("C) Earth", 1.0),
        ("**C. Earth, or so**", 1.0),
        ("A) no\nC) no\nB) no", 0.0),  # all are discussed, none is chosen
        ("<answer>C</answer>", 1.0),
        (r"\boxed{\mathbf{C}}", 1.0),
        (r"\boxed{C. Earth}", 1.0),
        ("B is wrong. I think it is C.", 1.0),
        ("It is A or C", 0.0),
        ("The answer is not C, it is D", 0.0),
        ("the answer is a planet", 0.0),
        ("A planet is a big thing", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_gpqa_finds_the_chosen_letter(response, score):
    assert compute_gpqa_reward(response, "C", {"choices": CHOICES}) == score


@pytest.mark.parametrize(
    "label, metadata", [(2, {}), ("Earth", {}), ("(c)", {}), (None, {"correct_letter": "C"})]
)
def test_gpqa_reference_may_be_letter_index_or_text(label, metadata):
    assert compute_gpqa_reward("Answer: C", label, {"choices": CHOICES, **metadata}) == 1.0
    assert compute_gpqa_reward("Answer: D", label, {"choices": CHOICES, **metadata}) == 0.0


def test_gpqa_ignores_letters_that_are_no_choice():
    assert compute_gpqa_reward("Answer: E\nC", "C", {"valid_letters": ["A", "B", "C", "D"]}) == 1.0


# Dispatch
def test_metadata_rm_type_wins_over_the_flag():
    sample = Sample(index=1, response="Yes.", label="yes", metadata={"rm_type": "f1"})
    assert asyncio.run(async_rm(make_args(rm_type="math"), sample)) == 1.0


def test_boxed_prefix_scores_only_the_box_and_leaves_the_sample_alone():
    sample = Sample(index=1, response=r"long text \boxed{the cat}", label="cat")
    assert asyncio.run(async_rm(make_args(rm_type="boxed_f1"), sample)) == 1.0
    assert sample.response == r"long text \boxed{the cat}"
    assert reward("boxed_f1", "cat", "cat") == 0.0


def test_unknown_rm_type_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'deepscaler'"):
        reward("deepscalar", "", "1")


def test_sample_without_any_reward_is_an_error_with_the_flags():
    with pytest.raises(ValueError, match="--custom-rm-path"):
        reward(None, "", "1")


def test_random_reward_is_a_fair_reproducible_coin():
    tosses = [
        asyncio.run(async_rm(make_args(rm_type="random"), Sample(index=i, response="same")))
        for i in range(200)
    ]
    again = [
        asyncio.run(async_rm(make_args(rm_type="random"), Sample(index=i, response="same")))
        for i in range(200)
    ]
    assert tosses == again and set(tosses) == {0, 1} and 60 < sum(tosses) < 140
