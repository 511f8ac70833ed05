"""The `f1` reward: overlap of words between an answer and the reference, as in question answering."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.rollout.response_text import without_special_tokens

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def f1_reward(response: str, label: str) -> float:
    """The f1 score of the response, from 0 to 1."""
    return f1_score(response, label)[0]


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """(f1, precision, recall). A yes/no answer must match whole: shared words earn nothing."""
    nothing = (0.0, 0.0, 0.0)
    if prediction is None:
        return nothing
    predicted, truth = normalize_answer(without_special_tokens(prediction)), normalize_answer(ground_truth)
    if predicted != truth and (predicted in _CLOSED_ANSWERS or truth in _CLOSED_ANSWERS):
        return nothing
    predicted_words, truth_words = predicted.split(), truth.split()
    shared = sum((Counter(predicted_words) & Counter(truth_words)).values())
    if shared == 0:
        return nothing
    precision, recall = shared / len(predicted_words), shared / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall
