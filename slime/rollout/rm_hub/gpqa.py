"""The `gpqa` reward: compares the chosen letter of a multiple-choice response with the correct one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.response_text import without_special_tokens

_DEFAULT_LETTERS = "ABCDEFGH"
_TAIL_CHARS = 20_000  # what was settled on stands at the end


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 or 0.0. The right answer is metadata `correct_letter`, or the label: a letter, an index or a text.

    metadata may hold `choices` (list of texts, or a mapping from letter to text) and `valid_letters`.
    """
    metadata = metadata or {}
    choices = _choices_by_letter(metadata.get("choices"))
    letters = _letters(metadata.get("valid_letters"), choices)
    correct = _correct_letter(metadata.get("correct_letter"), label, choices, letters)
    answer = without_special_tokens(response or "").rpartition("</think>")[2].strip()
    if correct is None:
        # Free text without choices: the only comparison left is the text itself.
        return float(label is not None and _plain(str(label)) != "" and _plain(answer) == _plain(str(label)))
    chosen = _chosen_letter(answer, letters) or _letter_of_choice_text(answer, choices)
    return float(chosen == correct)


def _choices_by_letter(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in choices.items()}
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return dict(zip(string.ascii_uppercase, map(str, choices), strict=False))
    return {}


def _letters(valid_letters: Any, choices: dict[str, str]) -> str:
    if valid_letters:
        return "".join(str(letter).strip().upper() for letter in valid_letters)
    return "".join(choices) or _DEFAULT_LETTERS


def _correct_letter(correct: Any, label: Any, choices: dict[str, str], letters: str) -> str | None:
    for candidate in (correct, label):
        if isinstance(candidate, int) and not isinstance(candidate, bool) and 0 <= candidate < len(letters):
            return letters[candidate]
        if candidate is None:
            continue
        text = str(candidate).strip()
        bare = text.strip("().: ").upper()
        if len(bare) == 1 and bare in letters:
            return bare
        for letter, choice in choices.items():
            if _plain(choice) == _plain(text):
                return letter
    return None


# What may stand before and after a letter: spaces, quotes, brackets, emphasis, a colon.
_AROUND = "[ *_$\"'“”‘’`()\\[\\]:：=.,-]*+"


def _chosen_letter(answer: str, letters: str) -> str | None:
    """The letter of the last explicit statement: strong forms ("answer is X") before weak ones (a lone X).

    Every pattern reads a text once: white space is single blanks by then, and what may repeat ends where it
    cannot.
    """
    letter = f"([{re.escape(letters)}])"
    face = r"(?:\\(?:text|mathrm|textbf|mathbf) ?\{)?"
    boxed = rf"\\boxed ?\{{ ?{face} ?\(?(?i:{letter})(?:\)?[^a-zA-Z{{}}]*\}}|[).:] )"
    tagged = rf"(?i:<answer> ?\(?{letter}(?:\)?[.:]?|[).:] [^<>]*)</answer>)"
    stated = (
        rf"(?i:answer|choice|option)(?:{_AROUND}(?i:is|are|should be|would be|must be|therefore|thus|clearly|"
        rf"likely|most|probably|option|choice|letter)(?![a-zA-Z])){{0,4}}{_AROUND}{face} ?\(?"
        rf"(?:{letter}(?![a-zA-Z'])|((?i:{letter}))(?=\W{{0,9}}$))"
    )
    answer = answer[-_TAIL_CHARS:]
    in_one_line = " ".join(answer.split())
    statements = [upper or lower for upper, lower, _ in re.findall(stated, in_one_line)]
    letters_found = (
        re.findall(boxed, in_one_line)
        or re.findall(tagged, in_one_line)
        or statements
        or _letters_of_lines(answer, letter)
        or re.findall(rf"\({letter}\)", answer)
        or _at_the_end(answer, letter)
    )
    return letters_found[-1].upper() if letters_found else None


def _letters_of_lines(answer: str, letter: str) -> list[str]:
    """Lines of a letter alone; or else the letter of the one line that begins with it, as in "C) Earth"."""
    lines = [line.strip() for line in answer.splitlines()]
    lone = re.compile(rf"[\(\[*\"'`]*(?i:{letter})[\)\].:*\"'`]*")
    alone = [found.group(1) for line in lines if (found := lone.fullmatch(line))]
    begun = re.compile(rf"[\(*]*{letter}[).:]\**\s+\S")
    beginnings = [found.group(1) for line in lines if (found := begun.match(line))]
    return alone or (beginnings if len(beginnings) == 1 else [])


def _at_the_end(answer: str, letter: str) -> list[str]:
    """The letter that the last sentence ends in, where it names no other: "I think it is C."."""
    last = re.split(r"[.!?]\s+", answer.strip())[-1]
    named = re.findall(rf"(?<![\w'’]){letter}(?![\w'’])", last)
    ended = re.search(rf"(?<![\w'’]){letter}\W{{0,9}}$", last)
    return named if len(named) == 1 and ended else []


def _letter_of_choice_text(answer: str, choices: dict[str, str]) -> str | None:
    """The one choice whose text the last line repeats; two candidates are no answer."""
    last = _plain((answer.strip().splitlines() or [""])[-1])
    matching = [letter for letter, text in choices.items() if _plain(text) and _plain(text) in last]
    return matching[0] if len(matching) == 1 else None


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s.+-]", " ", text.lower()).split()).strip(". ")
