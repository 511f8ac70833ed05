"""The `deepscaler` reward: 1 if the boxed answer after the reasoning equals one of the references."""

from __future__ import annotations

from slime.rollout.rm_hub.expressions import warm_up as warm_up  # a check worker calls it
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy


def get_deepscaler_rule_based_reward(response: str, label: str | int | float | list) -> int:
    """1 or 0. A response that never closes its thinking (`</think>` or `###Response`) earns nothing."""
    solution = _after_thinking(response)
    answer = extract_answer(solution) if solution is not None else None
    if answer is None:
        return 0
    references = [str(item) for item in (label if isinstance(label, (list, tuple)) else [label])]
    truths = [extract_answer(ref) if "\\boxed" in ref else ref for ref in references]
    return int(any(t and (grade_answer_mathd(answer, t) or grade_answer_sympy(answer, t)) for t in truths))


def _after_thinking(response: str) -> str | None:
    for marker in ("</think>", "###Response"):
        if marker in response:
            return response.rpartition(marker)[2]
    return None
