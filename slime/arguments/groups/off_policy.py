"""Flags of the correction for tokens that another policy than the trainer's sampled."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag

LEVELS = ("token", "sequence", "geometric")
# Each of these takes into account that other weights than the current ones sampled a token.
CORRECTIONS = ("use_tis", "use_rs", "use_rollout_logprobs", "keep_old_actor")


@dataclass
class OffPolicyFlags:
    """Off-policy correction."""

    use_tis: bool = flag(
        False,
        "weight the policy loss by the ratio of trainer to engine policy; asynchronous runs do so unless "
        "told otherwise",
    )
    tis_clip: float = flag(2.0, "upper bound of that weight", gt=0)
    tis_clip_low: float = flag(0.0, "lower bound of that weight", ge=0)
    tis_level: str = flag(
        "token", "whose ratio: of the token, or of its sequence as product or mean", choices=LEVELS
    )
    tis_mode: str = flag(
        "clip",
        "outside the bounds: clip to both, truncate to the upper, or mask to 0 (IcePop)",
        choices=("clip", "truncate", "mask"),
    )
    tis_batch_normalize: bool = flag(
        False, "divide the weights by their mean over the optimizer step, so that they average 1"
    )
    custom_tis_function_path: str | None = flag(None, "function in place of the weights", metavar="PATH")
    use_rs: bool = flag(False, "leave tokens or samples out of the policy loss whose ratio is out of bounds")
    rs_level: str = flag("token", "whose ratio decides", choices=LEVELS)
    rs_upper: float = flag(2.0, "upper bound of that ratio", gt=0)
    rs_lower: float | None = flag(None, "lower bound; default: 1 / --rs-upper", ge=0)
    rs_veto: float | None = flag(None, "leave out a whole sample if one token's ratio is below this", gt=0)
    use_opsm: bool = flag(False, "leave out samples of negative advantage that drifted from the old policy")
    opsm_delta: float = flag(1e-4, "how far such a sample may drift (mean log-ratio)", ge=0)
    get_mismatch_metrics: bool = flag(False, "report how far engine and trainer policy lie apart (mis_*)")
