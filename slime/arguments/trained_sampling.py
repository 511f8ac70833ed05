"""How trained tokens may be drawn: the one rule, for the run's flags and for what a generate function asks an engine.

The trainer takes log-probs of the policy at --rollout-temperature over its whole vocabulary, and so does an engine before
it filters. What else bends the distribution leaves no trace in these numbers, so it can only be refused where it is asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

# What bends the distribution -> the value that does not.
NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
GREEDY_BELOW = 1e-6  # temperatures at which engines draw greedily; that of slime.wire.protocol
# Filters whose outcome an engine may tell: the ids that each token was drawn from.
TOLD_BY_NUCLEUS = ("top_p", "top_k", "min_p")
# Fields that allow some texts, or favour some tokens.
CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag", "logit_bias", "custom_logit_processor")


def refusal(
    params: Mapping[str, Any],
    *,
    spelling: Callable[[str], str] = str,
    vocab_size: int | None = None,
    nucleus_told: bool = False,
) -> str | None:
    """Why tokens that are drawn with `params` must not be trained on; None: they may.

    `spelling` is how a user writes a name. `nucleus_told`: the engine says which ids each token was drawn from.
    """
    temperature = params.get("temperature")
    if (isinstance(temperature, (int, float)) and 0 <= temperature < GREEDY_BELOW) or params.get("top_k") == 1:
        name = "top_k" if params.get("top_k") == 1 else "temperature"
        return f"{spelling(name)} is {params[name]}: greedy decoding is not a policy RL can improve. {_accept(name)}"
    for name in NEUTRAL:
        if _is_neutral(name, params.get(name), vocab_size) or (nucleus_told and name in TOLD_BY_NUCLEUS):
            continue
        return (
            f"{spelling(name)} is {params[name]}: the engine then samples from a truncated distribution whose log-probs the "
            f"trainer does not compute, so importance ratios are wrong. {_accept(name)}"
        )
    for name in CONSTRAINTS:
        if params.get(name):
            return (
                f"{spelling(name)} is set: the engine then samples from a constrained distribution whose log-probs the trainer "
                f"does not compute, so importance ratios are wrong. {_accept(name)}"
            )
    return None


def _is_neutral(name: str, value: Any, vocab_size: int | None) -> bool:
    if name == "top_k" and isinstance(value, int):
        return value < 0 or (vocab_size is not None and value >= vocab_size)
    return value is None or value == NEUTRAL[name]


def _accept(name: str) -> str:
    use = {"temperature": "Use a value > 0"}.get(name) or (
        f"Use {NEUTRAL[name]:g}" if name in NEUTRAL else "Remove it"
    )
    return f"{use}, or accept the mismatch with --allow-sampling-mismatch."
