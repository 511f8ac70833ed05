"""Checks a run's arguments for SGLang, and refuses models that it cannot serve."""

from __future__ import annotations

from slime.arguments.core.devices import visible_gpus
from slime.arguments.core.draft import Draft
from slime.arguments.passthrough.sglang_flags import need_python


def why_meant(draft: Draft) -> str | None:
    """Return why the flags select this engine; None: they do not."""
    given = draft.sglang_options or draft.sglang_config or draft.prefill_num_servers
    return "flags of SGLang are given" if given else None


def interpreter(given: str | None, reason: str) -> dict[str, str]:
    """Return the flag that names the interpreter with SGLang; a ValueError where there is none."""
    return {"sglang_python": need_python(given, reason)}


def make_reproducible(draft: Draft) -> None:
    """Warn if this machine has no GPU; those of a cluster or of external servers are not known here."""
    elsewhere = draft.runtime == "ray" or draft.rollout_external_engine_addrs or draft.debug_train_only
    if not elsewhere and not visible_gpus():
        draft.warn(
            "--deterministic-mode: SGLang has its deterministic mode on GPUs only, and this machine shows "
            "none: tokens differ from run to run, and only what is trained on is kept and counted exactly; "
            "--rollout-engine embedded gives the same bits on a CPU."
        )


def check_adapter_sync(draft: Draft, own_requests: str | None) -> None:
    """Refuse settings that exclude `--lora-sync adapter`; `own_requests`: a flag that names user code."""
    if draft.offload_rollout:
        raise ValueError(
            "--lora-sync adapter with --offload-rollout on SGLang engines: they lose the model with their "
            "memory, and adapters alone do not bring it back; use --lora-sync merged."
        )
    if own_requests is not None:
        raise ValueError(
            f"--lora-sync adapter with {own_requests} on SGLang engines: requests of one's own that do not "
            "name the adapter would be answered by the model without it; use --lora-sync merged."
        )


def lacks_images_of(model_type: str) -> bool:
    """Return whether the engine cannot serve this type of vision-language model."""
    return model_type in ("idefics3", "smolvlm")
