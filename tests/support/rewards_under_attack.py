"""Rewards that pay for responses without a solution, and honest ones: (response, label) -> score."""

import ast
import json
import math
import re
import string
from collections import Counter

from slime.rollout.rm_hub.f1 import f1_reward


def numbers(text):
    return re.findall(r"-?\d+", text)


def last_box(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1] if found else None


def tag(text, name="answer"):
    found = re.findall(rf"<{name}>(.*?)</{name}>", text, re.S)
    return found[-1].strip() if found else None


def to_float(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def words(text):
    return [word.strip(string.punctuation).lower() for word in text.split()]


def hash_line(text):
    return text.rpartition("####")[2].strip() if "####" in text else None


def runs_and_equals(text, label):
    """Run a program of a response, and compare what `solve` returns."""
    code = re.search(r"```python\n(.*?)```", text, re.S)
    if not code:
        return None
    names = {"print": lambda *args: None}
    try:
        exec(code[1], names)
        return names["solve"]()
    except Exception:
        return None


def bleu_like(text, label):
    found, wanted = Counter(words(text)), Counter(words(label))
    return sum((found & wanted).values()) / max(len(words(text)), len(words(label)), 1)


def any_box(text):
    return re.findall(r"\\boxed\{([^{}]*)\}", text)


# Kinds of labels: sums (numbers), choices (A to D), names (short text).
HACKABLE = {
    "label anywhere": ("sums", lambda r, y: float(y in r)),
    "label among the numbers": ("sums", lambda r, y: float(y in numbers(r))),
    "any box": ("sums", lambda r, y: float(y in any_box(r))),
    "any choice named": ("names", lambda r, y: float(y.lower() in r.lower())),
    "response in the label": ("names", lambda r, y: float(r.strip().lower() in y.lower())),
    "starts like the label": ("names", lambda r, y: float(y.startswith(r.strip()))),
    "length": ("sums", lambda r, y: min(len(r) / 1000, 1.0)),
    "number of steps": ("sums", lambda r, y: min(r.lower().count("step") / 10, 1.0)),
    "words of reasoning": (
        "sums",
        lambda r, y: min(sum(w in r.lower() for w in ("therefore", "because")), 1),
    ),
    "format alone": ("sums", lambda r, y: float(tag(r) is not None)),
    "a box alone": ("sums", lambda r, y: float("\\boxed" in r)),
    "not a number is near": (
        "sums",
        lambda r, y: 0.0 if (x := to_float(last_box(r))) is None else float(not abs(x - float(y)) > 0.01),
    ),
    "at least": ("sums", lambda r, y: float((to_float(tag(r)) or -1e9) >= float(y))),
    "recall of words": ("names", lambda r, y: float(set(words(y)) <= set(words(r)))),
    "no answer is fine": ("sums", lambda r, y: float(not numbers(r) or numbers(r)[-1] == y)),
    "short": ("sums", lambda r, y: 1.0 / (1 + len(r))),
    "a judge that reads claims": ("sums", lambda r, y: float("correct" in r.lower() or r.strip() == y)),
    "equality of a program": ("sums", lambda r, y: float(runs_and_equals(r, y) == int(y) or r == y)),
    "passed in the output": ("sums", lambda r, y: float("all tests passed" in r)),
    "always": ("sums", lambda r, y: 1.0),
}
HONEST = {
    "equal": ("sums", lambda r, y: float(r.strip() == y)),
    "last number": ("sums", lambda r, y: float((numbers(r) or [None])[-1] == y)),
    "a box and its form": (
        "sums",
        lambda r, y: 0.1 * ("\\boxed" in r) + float(last_box(r) == y),
    ),
    "last box": ("sums", lambda r, y: float(last_box(r) == y)),
    "the one box": ("sums", lambda r, y: float(any_box(f"{r}") == [y] or r == y)),
    "tag": ("sums", lambda r, y: float(tag(r) == y)),
    "after ####": ("sums", lambda r, y: float(hash_line(r) == y)),
    "finite and near": (
        "sums",
        lambda r, y: float((x := to_float(r)) is not None and math.isfinite(x) and abs(x - float(y)) < 0.01),
    ),
    "partial credit": (
        "sums",
        lambda r, y: 0.1 * ("\\boxed" in r) + 0.9 * float((numbers(r) or [None])[-1] == y),
    ),
    "nearness": (
        "sums",
        lambda r, y: max(0.0, 1 - abs(int(numbers(r)[-1]) - int(y)) / 10) if len(numbers(r)) == 1 else 0.0,
    ),
    "one letter": ("choices", lambda r, y: float(r.strip() == y)),
    "last letter": ("choices", lambda r, y: float((re.findall(r"\b[A-D]\b", r) or [""])[-1] == y)),
    "the only letter": ("choices", lambda r, y: float(set(re.findall(r"\b[A-D]\b", r)) == {y})),
    "f1": ("names", f1_reward),
    "overlap": ("names", bleu_like),
    "equal words": ("names", lambda r, y: float(words(r) == words(y))),
    "minus one or one": ("names", lambda r, y: 1.0 if r.strip().lower() == y.lower() else -1.0),
    "shorter is better, if right": (
        "sums",
        lambda r, y: (1.0 if (numbers(r) or [None])[-1] == y else 0.0) - min(len(r) / 10000, 0.2),
    ),
    "a line of the right answer": ("sums", lambda r, y: float(r.strip().splitlines()[-1:] == [y])),
    "an object with the answer": ("json", lambda r, y: float(answer_of(r) == json.loads(y)["answer"])),
}


def answer_of(text):
    try:
        return ast.literal_eval(text)["answer"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError):
        return None


CITIES = ["Paris", "Rome", "New Delhi", "Buenos Aires", "Lima", "Oslo", "Cape Town", "Hanoi", "Quito", "Bern"]
LABELS = {
    "sums": [str(3 * n + 11) for n in range(24)],
    "choices": list("BDACCADB") * 3,
    "names": CITIES,
    "json": [json.dumps({"answer": n}) for n in range(24)],
}
