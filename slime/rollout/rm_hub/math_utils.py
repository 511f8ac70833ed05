"""Finds the boxed answer in a solution and decides whether it equals the reference, by text or by algebra."""

from __future__ import annotations

import re
from decimal import Decimal

from slime.rollout.rm_hub.expressions import expressions_equal
from slime.rollout.rm_hub.workers.limits import MAX_ANSWER_CHARS, note

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_OPENING = re.compile(r"\s*\{")
_BRACES = re.compile(r"[{}]")
_REST_OF_LINE = re.compile(r"[^$\n]*")
# Signs that look like the plain ones: minus signs and hyphens, wide commas and digits.
_LOOKALIKES = str.maketrans("−–‐‑‒﹣－＋，．０１２３４５６７８９", "-------+,.0123456789")
# What sets an answer apart on the page and says nothing about it; after a backslash it is the end of a row.
_SPACING = re.compile(r"(?<!\\)\\(?:(?:display|text)style(?![a-zA-Z])|q?quad(?![a-zA-Z])|[()\[\] ])|~")
_FACE = re.compile(
    r"(?:\\(?:boxed|fbox|underline|mbox|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|boldsymbol|bm)\s*)?\{"
)
# Commands and signs that mean the same, and the one that stands for all.
_RELATIONS = (
    (re.compile(r"\\(?:leqslant|leqq|le)(?![a-zA-Z])|≤|⩽|<="), r"\\leq "),
    (re.compile(r"\\(?:geqslant|geqq|ge)(?![a-zA-Z])|≥|⩾|>="), r"\\geq "),
    (re.compile(r"\\ne(?![a-zA-Z])|≠"), r"\\neq "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
)
_CONSTANT = re.compile(  # \mathrm{e}, which is no unit
    r"(?P<before>[a-zA-Z])?\\(?:mathrm|operatorname|text|rm)(?:\s*\{\s*(?P<in>[ei])\s*\}|\s+(?P<bare>[ei])(?![a-zA-Z]))"
)
_SCIENTIFIC = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,2})\s*")
_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"-?\\frac\{-?\d+\}\{-?\d+\}")
UNITS = (
    "square units|square|units|unit|degrees|degree|dollars|dollar|cents|cent|percent|points|point|miles|mile|"
    "feet|foot|ft|inches|inch|meters|meter|cm|mm|km|hours|hour|hrs|minutes|minute|seconds|second|days|day|weeks|"
    "week|months|month|years|year|mph|kmh|kg|grams|gram|cubic|per|apples|students|people|ways"
)


def last_boxed_only_string(string: str) -> str | None:
    """The last complete `\\boxed{...}`, `\\fbox{...}` or `\\boxed 7`, with the command itself; None: none."""
    closed: dict[int, int] | None = None
    for match in reversed(list(_BOX.finditer(string))):
        brace = _OPENING.match(string, match.end())
        if brace is not None:
            # Once for all boxes: with thousands that never close, one search each would take forever.
            closed = _closing_braces(string) if closed is None else closed
            if brace.end() - 1 in closed:
                return string[match.start() : closed[brace.end() - 1] + 1]
        elif string.startswith(" ", match.end()):
            rest = _REST_OF_LINE.match(string, match.end())
            return match.group() + (rest.group().rstrip() if rest is not None else "")
    return None


def remove_boxed(s: str | None) -> str | None:
    """The content of a string made by `last_boxed_only_string`; None when it is not one."""
    match = _BOX.match(s or "")
    if match is None:
        return None
    content = match.string[match.end() :].strip()
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last box in the solution; None: no box."""
    return remove_boxed(last_boxed_only_string(solution))


extract_answer = extract_boxed_answer


def common_signs(answer: str) -> str:
    """The answer with one sign for each meaning: \\le is \\leq, \\mathrm{e} is e, and 1e3 is 1000."""
    text = answer
    for pattern, sign in _RELATIONS:
        text = pattern.sub(sign, text)
    text = _CONSTANT.sub(_bare_constant, text)
    number = _SCIENTIFIC.fullmatch(text)
    return text if number is None else format(Decimal(number[1]).normalize(), "f")


def _bare_constant(match: re.Match[str]) -> str:
    name = match["in"] or match["bare"]
    return name if match["before"] is None else f"{match['before']}{{{name}}}"  # \\pi\\mathrm{i}


def plain_spelling(answer: str) -> str:
    """The answer without its type-setting: faces, spaces, braces around the whole, signs that look alike."""
    text = common_signs(answer).translate(_LOOKALIKES).replace("{,}", ",")
    text = re.sub(r"(?:\\\\)+\s*$", "", _SPACING.sub(" ", text)).strip()
    while (face := _FACE.match(text)) and _closing_braces(text).get(face.end() - 1) == len(text) - 1:
        text = text[face.end() : -1].strip()
    return text


def mathd_normalize_answer(answer: str | None) -> str | None:
    """One spelling for answers that differ only in LaTeX habits (spaces, \\dfrac, \\left, units, a/b, .5)."""
    if answer is None:
        return None
    text = plain_spelling(answer)
    text = re.sub(r"\\left|\\right|\\!|\\[,;:]|\\\$|\$|\^\{?\\circ\}?|°|\\degree|\\?%", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    # A unit after a value; alone it is the answer itself.
    text = re.sub(r"(?<=\S)\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?\s*$", "", text)
    text = re.sub(rf"(?<=\d)\s+(?:{UNITS})\.?\s*$", "", text)
    text = re.sub(r"^[a-zA-Z]{1,2}\s*(?:=|\\in(?![a-zA-Z]))\s*", "", text)  # "x = 3" answers with 3
    text = re.sub(r"^\+(?=[\d.\\])", "", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(
        r"(?<![\d./])(\d+)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}", text
    )  # before spaces go: 2 3/4 is not 23/4
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\w)", r"\\frac\1{\2}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"^\\frac\{-(\d+)\}(\{\d+\})$", r"-\\frac{\1}\2", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text)
    if text.isalpha() and (text[1:].islower() or len(text) > 3):
        text = text.lower()  # a word; a letter or two may be names
    return "\\frac{1}{2}" if text == "0.5" else text


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Equal after normalising the spelling."""
    if _too_long(given_answer, ground_truth):
        return (given_answer or "").strip() == (ground_truth or "").strip()
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Equal as mathematics, element by element for tuples and intervals.

    A whole-number reference wants a whole number and a fraction wants a reduced one: otherwise a model earns
    the reward by boxing the unevaluated question (12*34 for 408).
    """
    if _too_long(given_answer, ground_truth):
        return False
    given, truth = mathd_normalize_answer(given_answer), mathd_normalize_answer(ground_truth)
    if not given or not truth:
        return False
    if given == truth:
        return True
    given_parts, truth_parts = _split_tuple(given), _split_tuple(truth)
    if len(given_parts) != len(truth_parts):
        return False
    if len(truth_parts) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return all(_elements_equal(g, t) for g, t in zip(given_parts, truth_parts, strict=True))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Grade a whole solution: its boxed answer against the reference (boxed or bare)."""
    if not ground_truth:
        return False
    truth = extract_boxed_answer(ground_truth) if "\\boxed" in ground_truth else ground_truth
    given = extract_answer(solution_str)
    if given is None or truth is None:
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)


def _too_long(given: str | None, truth: str | None) -> bool:
    """Return whether a text is too long to normalise, and log that once."""
    length = max(len(given or ""), len(truth or ""))
    if length > MAX_ANSWER_CHARS:
        note(f"an answer of {length} characters")
    return length > MAX_ANSWER_CHARS


def _closing_braces(string: str) -> dict[int, int]:
    """Map the position of each opening brace to the position of its closing brace."""
    closed, opened = {}, []
    for match in _BRACES.finditer(string):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closed[opened.pop()] = match.start()
    return closed


def _split_tuple(text: str) -> list[str]:
    """Elements of `(a,b)` or `[a,b)`; a text that is no tuple is its own only element."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return [text]
    parts, depth = [""], 0
    for char in text[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if depth < 0:
            return [text]  # (a)(b): the outer brackets are not a pair
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _elements_equal(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _INTEGER.fullmatch(truth) and not _INTEGER.fullmatch(given):
        return False
    if _FRACTION.fullmatch(truth) and _FRACTION.fullmatch(given):
        return False  # both are written as fractions and differ: one is not reduced, or they are not equal
    return expressions_equal(given, truth)
