"""Verifiable instructions: for each id, one response that obeys and one that does not."""

import json

import pytest

from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.instructions import CHECKS

PALINDROMES = "level radar civic kayak refer rotor madam stats tenet solos"
CASES = [
    ("keywords:existence", {"keywords": ["Cat", "dog"]}, "a cat and a dog", "a cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat Cat", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "cat", "cat cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "the Cat"),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "zZ", "z"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Two!",
        "One, 1.5 m.",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "don't go",
        "one two three",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "And"},
        "One.\n\nand two.",
        "One.\n\nThen two.",
    ),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two", "one"),
    ("count:unique_word_count", {"N": 2}, "one two", "one One one"),
    ("count:numbers", {"N": 2}, "3 and 4.5", "3"),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES.replace("level", "lever")),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. more", "Bye. PS"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**bold** b"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and b"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Song of joy>>\nla", "<< >> la"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("combination:two_responses", {}, "one******two", "one******one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi: hi", "hi"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'Once. "The end."', "The end. Or not"),
    ("startend:quotation", {}, '"quoted"', '"half'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "at least"},
        "so BIG",
        "so Big",
    ),
    ("change_case:english_capital", {}, "ALL LOUD!", "Not LOUD"),
    ("change_case:english_lowercase", {}, "all quiet.", "Not quiet"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize("name, kwargs, good, bad", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_instruction_tells_obeying_from_disobeying(name, kwargs, good, bad):
    metadata = {"instruction_id_list": [name], "kwargs": [kwargs]}
    assert compute_ifbench_reward(good, None, metadata) == 1.0
    assert compute_ifbench_reward(bad, None, metadata) == 0.0


def test_every_instruction_has_a_case():
    assert {case[0] for case in CASES} == set(CHECKS)


def test_all_instructions_must_be_obeyed_and_null_arguments_are_ignored():
    metadata = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least", "keyword": None}],
    }
    assert compute_ifbench_reward("one two", None, metadata) == 1.0
    assert compute_ifbench_reward("one", None, metadata) == 0.0


def test_instructions_may_come_as_the_json_text_of_the_label():
    label = json.dumps({"instruction_id_list": ["startend:quotation"], "kwargs": [{}]})
    assert compute_ifbench_reward('"yes"', label) == 1.0


def test_unknown_instruction_is_invalid_and_named_with_the_nearest():
    failure = compute_ifbench_reward(
        "x", None, {"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}
    )
    assert failure.kind == "invalid"
    assert (
        "punctuation:no_coma'" in failure.reason and "nearest known: punctuation:no_comma" in failure.reason
    )


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"instruction_id_list": ["startend:quotation"], "kwargs": [{}, {}]},
        {"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]},
        {
            "instruction_id_list": ["keywords:frequency"],
            "kwargs": [{"keyword": "a", "frequency": 1, "relation": "~"}],
        },
    ],
)
def test_malformed_instructions_are_invalid_never_zero(metadata):
    assert compute_ifbench_reward("x", "plain label", metadata).kind == "invalid"


def test_empty_response_obeys_nothing():
    assert compute_ifbench_reward(" ", None, {"instruction_id_list": ["punctuation:no_comma"]}) == 0.0
