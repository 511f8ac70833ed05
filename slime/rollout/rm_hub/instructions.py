"""Verifiable instructions: one small check per instruction id, each asking whether a response obeys it.

A check takes the response and the instruction's keyword arguments. The table at the end is the whole
registry; nothing is downloaded and no language model is asked.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any

_PARAGRAPH_RULE = re.compile(r"\s?\*\*\*\s?")
# Blanks, not \s: with line breaks in it, every empty line would be read again from each one before it.
_BULLET = re.compile(r"^[^\S\n]*(?:\*[^*].*|[-•+]\s.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "less than": operator.lt,
    "exactly": operator.eq,
    "equal to": operator.eq,
}


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def sentences_of(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text.strip()) if words_of(part)]


def _compare(count: int, relation: str | None, threshold: int) -> bool:
    if (relation or "at least") not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is not one of: {', '.join(_RELATIONS)}")
    return _RELATIONS[relation or "at least"](count, threshold)


def _count(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are divided by ***; an empty one is allowed only at the ends."""
    parts = [part.strip() for part in _PARAGRAPH_RULE.split(text)]
    return all(parts[1:-1]) and sum(bool(part) for part in parts) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = words_of(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(char) for char in postscript_marker if not char.isspace() and char != "."]
    pattern = r"^[^\S\n]*" + r"\.?\s?".join(letters)
    return re.search(pattern, text, re.IGNORECASE | re.MULTILINE) is not None


def _palindromes(text: str) -> bool:
    """At least ten words of five letters or more that read the same backwards."""
    words = [word.lower() for word in words_of(text) if len(word) >= 5]
    return sum(word == word[::-1] for word in words) >= 10


def _highlights(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


def _json_only(text: str) -> bool:
    body = re.sub(r"^```(?:json|JSON)?\s*\n?|\n?```$", "", text.strip())
    try:
        json.loads(body, parse_int=str)  # as text: JSON limits no number's digits, Python does
    except (ValueError, RecursionError):
        return False
    return True


def _one_per_line(text: str) -> bool:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return bool(lines) and all(len(line.split()) == 1 for line in lines)


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


CHECKS: dict[str, Callable[..., Any]] = {
    "keywords:existence": lambda text, keywords: all(_count(text, word) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=None: _compare(
        _count(text, keyword), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words
        )
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=None: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation=None: _compare(
        len(sentences_of(text)), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, num_words, relation=None: _compare(
        len(words_of(text)), relation, num_words
    ),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "count:word_count_range": lambda text, min_words, max_words: (
        min_words <= len(words_of(text)) <= max_words
    ),
    "count:unique_word_count": lambda text, N: len({word.lower() for word in words_of(text)}) >= N,
    "count:numbers": lambda text, N: len(re.findall(r"(?<![\w.])-?\d+(?:[.,]\d+)*", text)) == N,
    "words:palindrome": _palindromes,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(_BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(answer in text for answer in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": _json_only,
    "detectable_format:title": lambda text: any(
        title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text)
    ),
    "format:newline": _one_per_line,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=None: _compare(
        sum(word.isupper() for word in words_of(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
