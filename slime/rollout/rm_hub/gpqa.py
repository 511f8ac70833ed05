"""The `gpqa` reward: which letter a multiple-choice answer settled on, against the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

_DEFAULT_LETTERS = "ABCDEFGH"


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 or 0.0. The right answer is metadata `correct_letter`, or the label: a letter, an index or a text.

    metadata may hold `choices` (list of texts, or a mapping from letter to text) and `valid_letters`.
    """
    metadata = metadata or {}
    choices = _choices_by_letter(metadata.get("choices"))
    letters = _letters(metadata.get("valid_letters"), choices)
    correct = _correct_letter(metadata.get("correct_letter"), label, choices, letters)
    answer = (response or "").rpartition("</think>")[2].strip()
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


def _chosen_letter(answer: str, letters: str) -> str | None:
    """The letter of the last explicit statement: strong forms ("answer is X") before weak ones (a lone X).

    Every pattern reads a text once: white space is single blanks by then, and what may repeat ends where it
    cannot.
    """
    letter = f"([{re.escape(letters)}])"
    boxed = rf"\\boxed ?\{{ ?(?:\\(?:text|mathrm|textbf) ?\{{)? ?\(?{letter}\)?[^a-zA-Z{{}}]*\}}"
    stated = (
        r"(?i:answer|choice|option) ?(?i:is|are)? ?[:=]? ?(?:\*\*|\$|\\text\{)? ?(?i:option|choice)? ?[\(\[]?"
        rf"{letter}(?![a-zA-Z'])"
    )
    lone = re.compile(rf"[\(\[*]*{letter}[\)\].:*]*")
    in_one_line = " ".join(answer.split())
    lone_lines = [found.group(1) for line in answer.splitlines() if (found := lone.fullmatch(line.strip()))]
    letters_found = (
        re.findall(boxed, in_one_line)
        or re.findall(stated, in_one_line)
        or lone_lines
        or re.findall(rf"\({letter}\)", answer)
    )
    return letters_found[-1].upper() if letters_found else None


def _letter_of_choice_text(answer: str, choices: dict[str, str]) -> str | None:
    """The one choice whose text the last line repeats; two candidates are no answer."""
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    last = _plain(lines[-1])
    matching = [letter for letter, text in choices.items() if _plain(text) and _plain(text) in last]
    return matching[0] if len(matching) == 1 else None


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s.+-]", " ", text.lower()).split()).strip(". ")
