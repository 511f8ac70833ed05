"""Verifiable instructions: one small function per instruction id, each asking whether a response obeys it.

A function takes the response and the instruction's keyword arguments. The table at the end is the whole
registry; nothing is downloaded and no language model is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_PARAGRAPH_RULE = re.compile(r"\s?\*\*\*\s?")
# Blanks, not \s: with line breaks in it, every empty line would be read again from each one before it.
_BULLET = re.compile(r"^[^\S\n]*(?:\*[^*].*|[-•+]\s.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def sentences_of(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text.strip()) if words_of(part)]


def _compare(count: int, relation: str | None, threshold: int) -> bool:
    if relation in (None, "at least"):
        return count >= threshold
    if relation == "less than":
        return count < threshold
    if relation == "at most":
        return count <= threshold
    if relation in ("exactly", "equal to"):
        return count == threshold
    raise ValueError(f"relation {relation!r} is not one of: at least, at most, less than, exactly")


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


# -- keywords
def _keywords_exist(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return _compare(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def _no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_has_word(text, word) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


# -- length
def _number_sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    return _compare(len(sentences_of(text)), relation, num_sentences)


def _number_words(text: str, num_words: int, relation: str | None = None) -> bool:
    return _compare(len(words_of(text)), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are divided by ***; an empty one is allowed only at the ends."""
    parts = [part.strip() for part in _PARAGRAPH_RULE.split(text)]
    if any(not part for part in parts[1:-1]):
        return False
    return sum(bool(part) for part in parts) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = words_of(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _word_count_range(text: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(words_of(text)) <= max_words


def _unique_word_count(text: str, N: int) -> bool:  # the data sets spell it so
    return len({word.lower() for word in words_of(text)}) >= N


# -- content
def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(char) for char in postscript_marker if not char.isspace() and char != "."]
    pattern = r"^[^\S\n]*" + r"\.?\s?".join(letters)
    return re.search(pattern, text, re.IGNORECASE | re.MULTILINE) is not None


def _number_of_numbers(text: str, N: int) -> bool:  # the data sets spell it so
    return len(re.findall(r"(?<![\w.])-?\d+(?:[.,]\d+)*", text)) == N


def _palindromes(text: str) -> bool:
    """At least ten words of five letters or more that read the same backwards."""
    words = [word.lower() for word in words_of(text) if len(word) >= 5]
    return sum(word == word[::-1] for word in words) >= 10


# -- format
def _bullets(text: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text for answer in _CONSTRAINED)


def _highlights(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def _json_only(text: str) -> bool:
    body = re.sub(r"^```(?:json|JSON)?\s*\n?|\n?```$", "", text.strip())
    try:
        json.loads(body, parse_int=str)  # as text: JSON limits no number's digits, Python does
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def _one_per_line(text: str) -> bool:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return bool(lines) and all(len(line.split()) == 1 for line in lines)


# -- combination
def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    answers = [part for part in parts if part]
    return len(answers) == 2 and answers[0] != answers[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


# -- start and end
def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


# -- case and punctuation
def _capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    return _compare(sum(word.isupper() for word in words_of(text)), capital_relation, capital_frequency)


def _no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Callable[..., Any]] = {
    "keywords:existence": _keywords_exist,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "count:word_count_range": _word_count_range,
    "count:unique_word_count": _unique_word_count,
    "count:numbers": _number_of_numbers,
    "words:palindrome": _palindromes,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json_only,
    "detectable_format:title": _title,
    "format:newline": _one_per_line,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": _no_comma,
}
