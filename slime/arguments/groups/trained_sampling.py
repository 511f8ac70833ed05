"""How trained tokens may be drawn: one rule for flags and for what generate functions ask of an engine.

Trainer and engine take log-probs at --rollout-temperature, over the ids that an engine says it kept for a
token (top-p, top-k, min-p), else over the whole vocabulary. Whatever else bends the distribution is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import option_of
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.catalog.engines import ENGINES

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


class SamplingFlags(Protocol):
    """The settings of a run that decide how its tokens are drawn."""

    loss_type: str
    allow_sampling_mismatch: bool
    rollout_engine: str
    rollout_external_engine_addrs: list[str] | None
    rollout_top_p: float
    rollout_top_k: int


def engines_tell_nucleus(args: SamplingFlags) -> bool:
    """Whether the run's engines can say which ids they drew a token from."""
    return ENGINES[args.rollout_engine].dialect.reports_nucleus and not args.rollout_external_engine_addrs


def is_cut(params: Mapping[str, Any], vocab_size: int | None = None) -> bool:
    """Whether sampling parameters leave tokens out that an engine may tell of."""
    return any(not _is_neutral(name, params.get(name), vocab_size) for name in TOLD_BY_NUCLEUS)


def replays_nucleus(args: SamplingFlags) -> bool:
    """Whether by its flags a run trains on tokens that come with the ids they were drawn from."""
    cut = is_cut({"top_p": args.rollout_top_p, "top_k": args.rollout_top_k})
    return cut and not args.allow_sampling_mismatch and args.loss_type not in SUPERVISED_LOSSES


def refusal(
    params: Mapping[str, Any],
    *,
    spelling: Callable[[str], str] = str,
    vocab_size: int | None = None,
    nucleus_told: bool = False,
    to_be_told: str = "",
) -> str | None:
    """Why tokens that are drawn with `params` must not be trained on; None: they may.

    `spelling` is how a user writes a name. `nucleus_told`: the engine says which ids each token was drawn
    from; else `to_be_told` may name a way to make it.
    """
    temperature = params.get("temperature")
    cold = isinstance(temperature, (int, float)) and 0 <= temperature < GREEDY_BELOW
    if cold or params.get("top_k") == 1:
        name = "top_k" if params.get("top_k") == 1 else "temperature"
        greedy = f"{spelling(name)} is {params[name]}: greedy decoding is not a policy RL can improve."
        return f"{greedy} {_accept(name)}"
    wrong = "distribution whose log-probs the trainer does not compute"
    for name in NEUTRAL:
        told = name in TOLD_BY_NUCLEUS
        if _is_neutral(name, params.get(name), vocab_size) or (nucleus_told and told):
            continue
        unless = " unless it is told which tokens were kept" if told else ""
        return (
            f"{spelling(name)} is {params[name]}: the engine then samples from a truncated {wrong}{unless}, "
            f"so importance ratios are wrong. {_accept(name, to_be_told if told else '')}"
        )
    for name in filter(params.get, CONSTRAINTS):
        return (
            f"{spelling(name)} is set: the engine then samples from a constrained {wrong}, so importance "
            f"ratios are wrong. {_accept(name)}"
        )
    return None


def _is_neutral(name: str, value: Any, vocab_size: int | None) -> bool:
    if name == "top_k" and isinstance(value, int):
        return value < 0 or (vocab_size is not None and value >= vocab_size)
    return value is None or value == NEUTRAL[name]


def _accept(name: str, other_way: str = "") -> str:
    use = f"Use {NEUTRAL[name]:g}" if name in NEUTRAL else "Remove it"
    use = "Use a value > 0" if name == "temperature" else use
    return ", ".join(filter(None, (use, other_way, "or accept the mismatch with --allow-sampling-mismatch.")))


def trained_sampling(draft: Draft) -> None:
    """The rule for --rollout-top-p and --rollout-top-k, once the engine is chosen."""
    if draft.allow_sampling_mismatch or draft.debug_train_only or draft.debug_rollout_only:
        return
    silent = "external engines do" if draft.rollout_external_engine_addrs else f"{draft.rollout_engine} does"
    params = {"top_p": draft.rollout_top_p, "top_k": draft.rollout_top_k}
    why = refusal(
        params,
        spelling=lambda name: option_of(f"rollout_{name}"),
        nucleus_told=engines_tell_nucleus(draft),
        to_be_told=f"use --rollout-engine embedded, which tells ({silent} not tell)",
    )
    if why is not None:
        raise ValueError(why)
    if not is_cut(params):
        return
    name = "top_p" if draft.rollout_top_p < 1 else "top_k"
    given = f"{option_of(f'rollout_{name}')} is {params[name]:g}"
    if draft.loss_type in SUPERVISED_LOSSES:
        raise ValueError(
            f"{given} with --loss-type {draft.loss_type}: a supervised loss is that of the model as it is; "
            f"use {NEUTRAL[name]:g} (evaluation has --eval-top-p and --eval-top-k)."
        )
    if draft.use_opd and draft.opd_type == "engine":
        raise ValueError(
            f"{given} with --opd-type engine: a teacher's engine scores tokens over its whole vocabulary. "
            f"{_accept(name, 'use --opd-type trainer')}"
        )
