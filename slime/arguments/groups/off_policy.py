"""Flags and rules of the correction for off-policy tokens, sampled by other weights than the trainer's."""

from dataclasses import dataclass

from slime.arguments.core.draft import ASYNCHRONOUS, Draft
from slime.arguments.core.flag import above, either, flag, lacks, needs
from slime.arguments.groups.objectives import POLICY_LOSS
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION

LEVELS = ("token", "sequence", "geometric")
# Each of these accounts for tokens that other weights than the current ones sampled.
CORRECTIONS = ("use_tis", "use_rs", "use_rollout_logprobs", "keep_old_actor")


# -- when flags have an effect
TIS = either(needs("use_tis"), needs("custom_tis_function_path"))
LOWER_BOUND = needs("tis_mode", "clip", "mask", or_if=lambda d: d.custom_tis_function_path is not None)
ASKS_FOR_WEIGHTS = either(needs("use_tis"), needs("get_mismatch_metrics"))
BUILT_IN_WEIGHTS = lacks("custom_tis_function_path")
OWN_REJECTION = lacks("custom_tis_function_path")
REJECTS = needs("use_rs")
OPSM = needs("use_opsm")
DRIFTS = either(
    # With one optimizer step per rollout, training starts at the old policy: no sample has drifted.
    above("num_steps_per_rollout", 1),
    needs("use_rollout_logprobs"),
    needs("keep_old_actor"),
)


@dataclass
class OffPolicyFlags:
    """Off-policy correction."""

    use_tis: bool = flag(
        False,
        "weight the loss by the ratio of trainer to engine. Asynchronous runs do so",
        only_with=POLICY_LOSS,
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", gt=0, only_with=TIS)
    tis_clip_low: float = flag(0.0, "lower bound of the weight", ge=0, only_with=(TIS, LOWER_BOUND))
    tis_level: str = flag(
        "token", "ratio per token, or per sequence", choices=LEVELS, only_with=(TIS, BUILT_IN_WEIGHTS)
    )
    tis_mode: str = flag(
        "clip",
        "outside: clip to both bounds, truncate to the upper, or mask to 0 (IcePop)",
        choices=("clip", "truncate", "mask"),
        only_with=(TIS, BUILT_IN_WEIGHTS),
    )
    custom_tis_function_path: str | None = flag(None, "function for the weights", only_with=ASKS_FOR_WEIGHTS)
    use_rs: bool = flag(
        False,
        "leave out tokens or samples whose ratio is out of bounds",
        only_with=(POLICY_LOSS, OWN_REJECTION),
    )
    rs_level: str = flag("token", "level of the ratio for rejection", choices=LEVELS, only_with=REJECTS)
    rs_upper: float = flag(2.0, "upper bound of the ratio", gt=0, only_with=REJECTS)
    rs_lower: float | None = flag(
        None, "lower bound of the ratio; default: 1 / upper", ge=0, only_with=REJECTS
    )
    rs_veto: float | None = flag(
        None, "leave out a whole sample if one token's ratio is below this", gt=0, only_with=REJECTS
    )
    use_opsm: bool = flag(
        False, "leave out drifted samples of negative advantage", only_with=(POLICY_LOSS, DRIFTS)
    )
    opsm_delta: float = flag(1e-4, "how far such a sample may drift (mean log-ratio)", ge=0, only_with=OPSM)
    get_mismatch_metrics: bool = flag(
        False,
        "report how much engine and trainer policy differ (mis_*)",
        only_with=POLICY_LOSS,
    )


def off_policy(draft: Draft) -> None:
    if draft.use_tis and draft.use_rollout_logprobs:
        raise ValueError(
            "--use-tis corrects from the engine's policy to the trainer's, but --use-rollout-logprobs takes "
            "ratios against the engine's; keep one of them."
        )
    if draft.tis_clip_low > draft.tis_clip:
        raise ValueError(f"--tis-clip-low is {draft.tis_clip_low:g}, above --tis-clip {draft.tis_clip:g}.")
    if draft.rs_lower is None:
        draft.derive("rs_lower", 1.0 / draft.rs_upper, "1 / rs_upper")
    if draft.rs_lower > draft.rs_upper:
        raise ValueError(
            f"--rs-lower is {draft.rs_lower:g}, above --rs-upper {draft.rs_upper:g}: nothing would be kept."
        )


def correct_stale_tokens(draft: Draft) -> None:
    """Runs that train on tokens of older weights weight them by default; fresh tokens have a weight of 1."""
    reasons = {
        "the asynchronous loop": draft.training_loop == ASYNCHRONOUS,
        "the fully asynchronous rollout": draft.rollout_function_path == FULLY_ASYNC_ROLLOUT_FUNCTION,
        "--partial-rollout": draft.partial_rollout and not draft.mask_offpolicy_in_partial_rollout,
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is None or draft.loss_type != "policy_loss" or draft.was_given("use_tis"):
        return
    if any(getattr(draft, name) for name in (*CORRECTIONS, "custom_tis_function_path")):
        return
    draft.derive(
        "use_tis", True, f"{reason} trains on tokens of older weights (--no-use-tis: as if they were fresh)"
    )
