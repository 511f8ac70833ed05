"""The `math` reward as a worker runs it: boxed answers compared by math-verify. Imported in check workers only."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_mathd

# It warns on every call that timeouts are off; here they are off on purpose.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def check_math(response: str, label: str) -> int:
    """1 when the last boxed answer of the response equals the label (boxed or bare), else 0."""
    given = extract_boxed_answer(response)
    truth = extract_boxed_answer(label) or label
    if given is None:
        return 0
    if grade_answer_mathd(given, truth):
        return 1
    # No timeouts of its own: they need SIGALRM, and the pool's deadline already bounds this process.
    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    answer = parse(f"\\boxed{{{given}}}", parsing_timeout=None)
    return int(verify(gold, answer, timeout_seconds=None))
