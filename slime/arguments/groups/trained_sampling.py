"""Decides how trained tokens may be sampled: one rule for flags and for requests of generate functions.

Trainer and engine compute log-probs at --rollout-temperature, over the ids that an engine reports for a token
(top-p, top-k, min-p), else over the whole vocabulary. Other changes of the distribution are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from slime.arguments.all_flags import Flags
from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import option_of
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.catalog.engines import ENGINES
from slime.utils import top_p

# Parameters that change the distribution -> their neutral values.
NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
GREEDY_BELOW = 1e-6  # engines decode greedily up to this temperature (as in slime.wire.protocol)
# Filters for which an engine can report the ids that each token was drawn from.
REPORTED_BY_NUCLEUS = ("top_p", "top_k", "min_p")
# Fields that permit only some texts, or favour some tokens.
CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag", "logit_bias", "custom_logit_processor")


def engines_report_nucleus(args: Flags | Draft) -> bool:
    """Return whether the run's engines can report which ids they drew a token from."""
    return ENGINES[args.rollout_engine].dialect.reports_nucleus and not args.rollout_external_engine_addrs


def asking_for_nucleus(args: Flags | Draft, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with which the run's engine reports the ids that it keeps."""
    most = ENGINES[args.rollout_engine].dialect.nucleus_top_k
    limit = {"top_k": most} if most and (params.get("top_k") or -1) < 0 else {}
    return {**params, **limit, "custom_params": {top_p.REQUEST_FIELD: True}}


def restricts_nucleus(params: Mapping[str, Any], vocab_size: int | None = None) -> bool:
    """Return whether sampling parameters leave out tokens in a way that an engine can report."""
    return any(not _is_neutral(name, params.get(name), vocab_size) for name in REPORTED_BY_NUCLEUS)


def replays_nucleus(args: Flags | Draft) -> bool:
    """Return whether a run trains on tokens that come with the ids they were drawn from."""
    restricted = restricts_nucleus({"top_p": args.rollout_top_p, "top_k": args.rollout_top_k})
    return restricted and not args.allow_sampling_mismatch and args.loss_type not in SUPERVISED_LOSSES


def refusal(
    params: Mapping[str, Any],
    *,
    spelling: Callable[[str], str] = str,
    vocab_size: int | None = None,
    nucleus_reported: bool = False,
    fix: str = "",
) -> str | None:
    """Return why tokens that are drawn with `params` must not be trained on; None: they may.

    `spelling` is how a user writes a name. `nucleus_reported`: the engine reports the ids that each token was
    drawn from; else `fix` may name a way to get them.
    """
    temperature = params.get("temperature")
    cold = isinstance(temperature, (int, float)) and 0 <= temperature < GREEDY_BELOW
    if cold or params.get("top_k") == 1:
        name = "top_k" if params.get("top_k") == 1 else "temperature"
        greedy = f"{spelling(name)} is {params[name]}: greedy decoding is not a policy RL can improve."
        return f"{greedy} {_accept(name)}"
    wrong = "distribution whose log-probs the trainer does not compute"
    for name in NEUTRAL:
        reported = name in REPORTED_BY_NUCLEUS
        if _is_neutral(name, params.get(name), vocab_size) or (nucleus_reported and reported):
            continue
        unless = " unless the engine reports which tokens were kept" if reported else ""
        return (
            f"{spelling(name)} is {params[name]}: the engine then samples from a truncated {wrong}{unless}, "
            f"so importance ratios are wrong. {_accept(name, fix if reported else '')}"
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
    """Apply the rule to --rollout-top-p and --rollout-top-k, once the engine is chosen."""
    if draft.allow_sampling_mismatch or draft.debug_train_only or draft.debug_rollout_only:
        return
    params = {"top_p": draft.rollout_top_p, "top_k": draft.rollout_top_k}
    why = refusal(
        params,
        spelling=lambda name: option_of(f"rollout_{name}"),
        nucleus_reported=engines_report_nucleus(draft),
        fix="use engines that the run starts itself (slime does not ask external engines for them)",
    )
    if why is not None:
        raise ValueError(why)
    if not restricts_nucleus(params):
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
    top_k = asking_for_nucleus(draft, params)["top_k"]
    if top_k != draft.rollout_top_k:
        draft.derive(
            "rollout_top_k", top_k, "SGLang reports which ids --rollout-top-p kept only with a top-k"
        )
