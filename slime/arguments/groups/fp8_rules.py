"""Rules about engines that hold the policy's weights in FP8."""

from slime.arguments.core.draft import Draft
from slime.arguments.groups.algorithm import LOGPROB_DIFF_THRESHOLDS
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.utils.fp8_config import block_size_of

# Flags of SGLang that --rollout-quantization fp8 sets itself.
_SET_FOR_FP8 = ("--quantization", "--load-format", "--json-model-override-args")


def engine_precision(draft: Draft) -> None:
    """Engines in FP8 differ from the trainer by more than arithmetic. Runs after the topology is known."""
    path = draft.engine_topology.policy.model_path
    from_folder = bool(path and block_size_of(path))
    if draft.rollout_quantization == "fp8":
        _from_16_bit(draft, from_folder)
    elif not from_folder:
        if draft.was_given("fp8_rounding") and draft.fp8_rounding != "auto":
            raise ValueError(
                f"--fp8-rounding is {draft.fp8_rounding}, but the engines hold no FP8 weights; remove it, "
                "or serve FP8 with --rollout-quantization fp8."
            )
        return
    on_grid = bool(draft.hf_checkpoint and block_size_of(draft.hf_checkpoint))
    if draft.fp8_rounding == "auto":
        rounding, why = (
            ("stochastic", "holds FP8 weights") if on_grid else ("nearest", "holds 16-bit weights")
        )
        draft.derive("fp8_rounding", rounding, f"hf_checkpoint {why}")
    if on_grid:
        draft.warn(_about_an_fp8_start(draft.hf_checkpoint, draft.fp8_rounding))
    if draft.logprob_diff_threshold is None and draft.loss_type not in SUPERVISED_LOSSES:
        draft.derive("logprob_diff_threshold", LOGPROB_DIFF_THRESHOLDS["fp8"], "engines have FP8 weights")


def _about_an_fp8_start(path: str, rounding: str) -> str:
    meaning = {
        "stochastic": "so weights are rounded to FP8 stochastically (--fp8-rounding)",
        "nearest": "and with --fp8-rounding nearest they do not reach the engines until they add up to half "
        "a step",
    }[rounding]
    return (
        f"--hf-checkpoint {path} holds FP8 weights: the trainer starts from values of FP8. Updates are much "
        "smaller than the "
        f"step between two of them, {meaning}. Better: the 16-bit checkpoint with --rollout-quantization fp8."
    )


def _from_16_bit(draft: Draft, from_folder: bool) -> None:
    """The engines get everything by pushes, and know that it is FP8 from us alone."""
    flag = "--rollout-quantization fp8"
    if from_folder:
        raise ValueError(
            f"{flag}: {draft.engine_topology.policy.model_path} holds FP8 weights already. Give the 16-bit "
            "checkpoint as --hf-checkpoint, from which the trainer starts better, or remove the flag."
        )
    if draft.rollout_external_engine_addrs:
        raise ValueError(
            f"{flag} with --rollout-external-engine-addrs: engines that run already decide themselves what "
            "they hold; start them from an FP8 checkpoint and remove the flag."
        )
    if draft.debug_rollout_only or draft.debug_train_only:
        raise ValueError(f"{flag}: a run with only one stage pushes nothing to engines; remove it.")
    if draft.lora_sync == "adapter":
        raise ValueError(
            f"{flag} with --lora-sync adapter: the model itself is never pushed; use --lora-sync merged."
        )
    own = {"--" + word for group in draft.engine_topology.policy.groups for word in group.overrides}
    given = {word.split("=")[0] for word in draft.sglang_options} | {word.replace("_", "-") for word in own}
    taken = [word for word in _SET_FOR_FP8 if word in given]
    if taken:
        raise ValueError(
            f"{flag} sets SGLang's {taken[0]} itself; remove --sglang-{taken[0].removeprefix('--')}."
        )
