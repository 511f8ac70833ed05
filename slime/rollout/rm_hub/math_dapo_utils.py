"""The `dapo` reward: the text after "Answer:" near the end of a solution, against the reference."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.response_text import without_special_tokens
from slime.rollout.rm_hub import math_utils
from slime.rollout.rm_hub.math_utils import last_boxed_only_string

_TAIL_CHARS = 300  # the answer stands at the end; looking no further keeps the pattern cheap
_ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
_PUNCTUATION = ".,;:!?*\"'`"
_VARIABLE = re.compile(r"(?<![a-zA-Z])[a-z]$")  # no word, and no letter of a choice
# Words that follow a number as its unit, and so say nothing about its value.
_UNIT_WORDS = re.compile(rf"(?<![a-zA-Z\\])(?:{math_utils.UNITS})(?![a-zA-Z])")


def remove_boxed(s: str) -> str:
    """The content of `\\boxed{...}`; ValueError when it is not boxed."""
    content = math_utils.remove_boxed(s)
    if content is None:
        raise ValueError(f"not a boxed answer: {s!r}")
    return content


def normalize_final_answer(final_answer: str, *, factorials: bool = False) -> str:
    """One spelling for a final answer: right of the last '=', without units, LaTeX and commas.

    `factorials`: an exclamation mark at the end is a factorial, as it always is after a variable; otherwise
    it is punctuation.
    """
    text = math_utils.common_signs(math_utils.extract_boxed_answer(final_answer) or final_answer)
    text = math_utils.plain_spelling(text.split("=")[-1])
    text = re.sub(r"\\(?:boxed|text|textbf|mathrm|overline)\s*\{([^{}]*)\}", r"\1", text)
    math_span = re.search(r"\$([^$]*)\$", text)
    if math_span and math_span.group(1).strip():
        text = math_span.group(1)
    text = re.sub(r"\\left|\\right|\\[!,;: ]|\\\$|\\%|\$|%|\^\{?\\circ\}?|\\ldots|\\dots|°", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = _UNIT_WORDS.sub("", text)
    text = re.sub(r"(?<![a-zA-Z])(?:an?|the)\s+", "", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\?frac([^{\\])([^{\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\?sqrt([^{\\\[])", r"\\sqrt{\1}", text)
    text = math_utils.plain_spelling(_without_punctuation(text, factorials))
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    number = re.fullmatch(r"([+-]?)0*(\d+)(?:(\.\d*?)0*)?", text)  # +7, 007 and 7.00 are 7
    if number is not None:
        value = number[2] + (number[3] or "").rstrip(".")
        text = value if number[1] != "-" or value == "0" else "-" + value
    return text


def _without_punctuation(text: str, factorials: bool) -> str:
    inner = text.strip(_PUNCTUATION)
    after = text[text.find(inner) + len(inner) :]
    kept = factorials or _VARIABLE.search(inner) is not None
    return f"{inner}!" if inner and after.startswith("!") and kept else inner


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = _ANSWER_PATTERN
) -> tuple[bool, str]:
    """(correct, prediction) by the last match of `answer_pattern`; "[INVALID]" when there is none."""
    if gt_need_extract:
        boxed = last_boxed_only_string(gt)
        gt = remove_boxed(boxed) if boxed is not None else gt
    factorials = "!" in str(gt)  # no label ends in an exclamation
    matches = re.findall(answer_pattern, without_special_tokens(solution_str))
    prediction = normalize_final_answer(matches[-1], factorials=factorials) if matches else "[INVALID]"
    truth = normalize_final_answer(str(gt), factorials=factorials)
    return prediction != "" and prediction == truth, prediction


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """(1 or -1, prediction): only a boxed answer near the end counts, and it must match exactly."""
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise ValueError(f"pause_tokens_index needs 4 positions, got {len(pause_tokens_index)}")
        pred = pred[max(0, pause_tokens_index[-1] - 100) :]
    else:
        pred = pred[-100:]
    boxed = last_boxed_only_string(pred)
    extracted = remove_boxed(boxed) if boxed is not None else None
    return (1 if extracted == str(gt) else -1), extracted


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """(correct, prediction) by the strict box, or else by the "Answer:" line."""
    if strict_box_verify:
        score, prediction = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, prediction
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": bool, "pred": text}; train on it with `--reward-key score`."""
    tail = without_special_tokens(solution_str)[-_TAIL_CHARS:]
    correct, prediction = verify(tail, str(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
