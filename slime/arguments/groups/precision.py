"""What --dtype auto means here: the precision that the machine computes in
fastest without losing what the model holds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.arguments.core.draft import Draft
from slime.catalog.backends import BACKENDS
from slime.utils.precision import bfloat16_units

SIXTEEN_BITS = ("bfloat16", "float16")


def derive_precision(draft: Draft, count_gpus: Callable[[], int]) -> None:
    """On a cluster every machine decides for itself, as nothing here is known of it."""
    if draft.runtime == "ray" or draft.dtype == "float32":
        return
    if count_gpus():
        _on_gpu(draft)
    else:
        _on_cpu(draft)


def _on_gpu(draft: Draft) -> None:
    # Loads torch, which counting the GPUs has done already.
    from slime.utils.accelerator import has_bfloat16

    if draft.dtype == "auto" and has_bfloat16():
        draft.derive("dtype", "bfloat16", "GPUs compute in it")
    elif draft.dtype == "auto":
        draft.derive("dtype", "float32", "these GPUs have no units for bfloat16")
    elif not has_bfloat16():
        draft.warn(
            "--dtype bfloat16: these GPUs have no units for it and emulate it; --dtype auto takes float32 "
            "here."
        )


def _on_cpu(draft: Draft) -> None:
    has_units, how = bfloat16_units()
    if draft.dtype == "bfloat16":
        if not has_units:
            draft.warn(
                f"--dtype bfloat16: this CPU {how}, so it emulates bfloat16, several times slower than "
                "float32; --dtype auto takes float32 here."
            )
        return
    stored = stored_dtype(draft.hf_checkpoint)
    if not has_units:
        draft.derive("dtype", "float32", f"this CPU {how}")
    elif stored not in SIXTEEN_BITS:
        draft.derive("dtype", "float32", f"a CPU; the model is stored in {stored or 'an unknown precision'}")
    elif BACKENDS[draft.train_backend].float32_on_cpu:
        draft.derive("dtype", "float32", "Megatron on a CPU")
    else:
        draft.derive("dtype", "bfloat16", f"this CPU {how}, and the model is stored in {stored}")


def stored_dtype(model: str | None) -> str | None:
    """The precision of a model's weights as its config says; None: it
    does not say, or is not on this machine.
    """
    config = _read_config(model) if model else {}
    parts = [config, config.get("text_config") or {}]
    return next(
        (part[key] for part in parts for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)),
        None,
    )


def _read_config(model: str) -> dict[str, Any]:
    try:
        content = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # missing and damaged files are told by those who need them
    return content if isinstance(content, dict) else {}
