"""Resolves `--dtype auto`, and checks settings of FP8 training and FP8 engines."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.groups.algorithm import LOGPROB_DIFF_THRESHOLDS
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.utils.models.model_config import block_size_of, read_config

SIXTEEN_BITS = ("bfloat16", "float16")
_CPUINFO = Path("/proc/cpuinfo")
_X86_FLAGS = ("amx_bf16", "avx512_bf16")
_ARM_FLAGS = ("bf16", "svebf16")
# Flags of SGLang that --rollout-quantization fp8 sets itself.
_SET_FOR_FP8 = ("--quantization", "--load-format", "--json-model-override-args")


def derive_precision(draft: Draft, count_gpus: Callable[[], int]) -> None:
    """Choose the precision for this machine; on a cluster every machine chooses for itself."""
    if draft.dtype == "float16":
        _check_float16(draft)
    if draft.runtime == "ray" or draft.dtype in ("float32", "float16"):
        return
    if count_gpus():
        _on_gpu(draft)
    else:
        _on_cpu(draft)


def _check_float16(draft: Draft) -> None:
    if not BACKENDS[draft.train_backend].scales_loss:
        raise ValueError(
            f"--dtype float16 with --train-backend {draft.train_backend}: this trainer does not scale the "
            "loss, without which gradients in fp16 vanish; use --train-backend fsdp or --dtype bfloat16."
        )
    if draft.fp8_training:
        raise ValueError("--dtype float16 with --fp8-training: FP8 products return bfloat16; keep one.")


def _on_gpu(draft: Draft) -> None:
    # Loads torch, which the count of GPUs has loaded already.
    from slime.utils.machine.accelerator import has_bfloat16

    if draft.dtype == "auto":
        why = "GPUs compute in it" if has_bfloat16() else "these GPUs have no units for bfloat16"
        draft.derive("dtype", "bfloat16" if has_bfloat16() else "float32", why)
    elif not has_bfloat16():
        draft.warn("--dtype bfloat16 is emulated by these GPUs; --dtype auto takes float32 here.")


def _on_cpu(draft: Draft) -> None:
    has_units, how = bfloat16_units()
    stored = stored_dtype(draft.hf_checkpoint)
    if draft.dtype == "bfloat16":
        if not has_units:
            draft.warn(f"--dtype bfloat16: this CPU {how}; it is several times slower than --dtype float32.")
    elif not has_units:
        draft.derive("dtype", "float32", f"this CPU {how}")
    elif stored not in SIXTEEN_BITS:
        draft.derive("dtype", "float32", f"a CPU; the model is stored in {stored or 'an unknown precision'}")
    elif BACKENDS[draft.train_backend].float32_on_cpu:
        draft.derive("dtype", "float32", "Megatron on a CPU")
    else:
        draft.derive("dtype", "bfloat16", f"this CPU {how}, and the model is stored in {stored}")


def stored_dtype(model: str | None) -> str | None:
    """Return the precision that a model's config names; None: it names none, or is not on this machine."""
    config: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a damaged one is reported where it is needed
        config = read_config(model) if model else {}
    parts = [config, config.get("text_config") or {}]
    return next(
        (part[key] for part in parts for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)),
        None,
    )


def engine_precision(draft: Draft) -> None:
    """Derive settings for FP8 engines, which differ from the trainer by more than rounding of sums."""
    path = draft.engine_topology.policy.model_path
    from_folder = bool(path and block_size_of(path))
    if draft.rollout_quantization != "none":
        _from_16_bit(draft, from_folder)
    if draft.rollout_quantization != "fp8" and not from_folder:
        if draft.was_given("fp8_rounding") and draft.fp8_rounding != "auto":
            raise ValueError(f"--fp8-rounding is {draft.fp8_rounding}, but the engines hold no FP8 weights.")
        return
    on_grid = bool(draft.start_from and block_size_of(draft.start_from))
    if draft.fp8_rounding == "auto":
        rounding, why = ("stochastic", "has FP8 weights") if on_grid else ("nearest", "has 16-bit weights")
        draft.derive("fp8_rounding", rounding, f"what the policy starts from {why}")
    if on_grid:
        meaning = "so weights are rounded to FP8 stochastically (--fp8-rounding)"
        if draft.fp8_rounding == "nearest":
            meaning = "and do not reach the engines until they add up to half a step (--fp8-rounding nearest)"
        draft.warn(
            f"--hf-checkpoint {draft.hf_checkpoint}: the trainer starts from values of FP8. Updates are much "
            f"smaller than the step between two of them, {meaning}. Better: the 16-bit checkpoint with "
            "--rollout-quantization fp8."
        )
    _allow_fp8_differences(draft, "engines have FP8 weights")


def _allow_fp8_differences(draft: Draft, why: str) -> None:
    if draft.logprob_diff_threshold is None and draft.loss_type not in SUPERVISED_LOSSES:
        draft.derive("logprob_diff_threshold", LOGPROB_DIFF_THRESHOLDS["fp8"], why)


def fp8_training(draft: Draft) -> None:
    """Check --fp8-training: FP8 products need whole matrices of the model. Runs before `engine_precision`."""
    if not draft.fp8_training:
        return
    size = draft.tensor_model_parallel_size
    if size > 1:
        raise ValueError(
            f"--fp8-training with --tensor-model-parallel-size {size}: products of cut matrices are in 16 "
            "bits in this version; keep one of them."
        )
    if draft.lora_rank:
        raise ValueError(
            "--fp8-training with --lora-rank: layers with adapters multiply in 16 bits; keep one."
        )
    _allow_fp8_differences(draft, "--fp8-training")


def _from_16_bit(draft: Draft, from_folder: bool) -> None:
    """Check --rollout-quantization: engines get all weights by pushes, which slime converts."""
    policy = draft.engine_topology.policy
    own = {"--" + word for group in policy.groups for word in group.overrides}
    given = {word.split("=")[0] for word in draft.sglang_options} | {word.replace("_", "-") for word in own}
    taken = [f"--sglang-{word.removeprefix('--')}" for word in _SET_FOR_FP8 if word in given]
    # With INT4 the trainer computes with the values that engines hold.
    int4, transport = draft.rollout_quantization == "int4", draft.update_weight_transport
    reasons = {
        f"{policy.model_path} contains FP8 weights already; give a 16-bit --hf-checkpoint": from_folder,
        "external engines choose their own format; start them from an FP8 checkpoint": (
            draft.rollout_external_engine_addrs
        ),
        "a run with only one stage pushes nothing to engines": draft.debug_rollout_only
        or draft.debug_train_only,
        "the model itself is never pushed; use --lora-sync merged": draft.lora_sync == "adapter",
        f"it sets SGLang's flags itself; remove {', '.join(taken)}": taken,
        "only --train-backend fsdp rounds weights": int4 and not BACKENDS[draft.train_backend].rounds_weights,
        "rounded weights need --dtype bfloat16 or float32": int4 and draft.dtype == "float16",
        "products are in 16 bits; remove --fp8-training": int4 and draft.fp8_training,
        "rounded weights have no adapters; remove --lora-rank": int4 and draft.lora_rank,
        "cut matrices have other groups; use --tensor-model-parallel-size 1": (
            int4 and draft.tensor_model_parallel_size > 1
        ),
        "deltas are of 16-bit weights; use --update-weight-mode full": (
            int4 and draft.update_weight_mode != "full"
        ),
        "SGLang gets packed weights as files; use --update-weight-transport disk": (
            int4 and ENGINES[draft.rollout_engine].packs_int4 and transport != "disk"
        ),
    }
    for why, holds in reasons.items():
        if holds:
            raise ValueError(f"--rollout-quantization {draft.rollout_quantization}: {why}.")


def bfloat16_units(cpuinfo: str | None = None) -> tuple[bool, str]:
    """Return whether this CPU has bfloat16 units, and the evidence: (False, "has no amx_bf16, avx512_bf16").

    `cpuinfo`: text in the form of /proc/cpuinfo. If nothing is known, the result is False.
    """
    line = re.search(
        r"^(?:flags|Features)\s*:(.*)$",
        _CPUINFO.read_text(errors="replace") if cpuinfo is None else cpuinfo,
        re.MULTILINE,
    )
    flags = line[1].split() if line else []  # of the first core; the others are alike
    wanted = _ARM_FLAGS if "asimd" in flags else _X86_FLAGS
    found = [flag for flag in wanted if flag in flags]
    return bool(found), f"has {', '.join(found)}" if found else f"has no {', '.join(wanted)}"
