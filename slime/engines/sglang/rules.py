"""Checks a run's arguments for SGLang, and refuses models that it cannot serve."""

from __future__ import annotations

from typing import Any

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


def check_parallel_sizes(draft: Draft) -> None:
    """Refuse sizes that do not fit an engine's GPUs, or with which weights would not reach all ranks."""
    for model in draft.engine_topology.models:
        for group in (group for group in model.groups if group.num_engines):
            where = f" (in the topology's model {model.name!r})" if group.overrides else ""
            _check_sizes(draft, group.overrides, group.num_gpus_per_engine, where)


def _check_sizes(draft: Draft, overrides: dict[str, Any], num_gpus: int, where: str) -> None:
    def given(name: str) -> int:
        return int(overrides.get(name, getattr(draft, f"sglang_{name}", None)) or 0)

    dp, attention, flag = given("dp_size") or 1, given("attn_dp_size") or 1, "--sglang-attn-dp-size"
    if attention == 1 and given("enable_dp_attention"):
        # SGLang 0.5.23 counts attention groups in a flag of their own, older releases in this one.
        dp, attention, flag = 1, dp, "--sglang-dp-size"
    if dp > 1:
        raise ValueError(
            f"--sglang-dp-size is {dp}{where}: SGLang would start {dp} copies of the model behind one "
            f"address, on {dp} times the GPUs of --rollout-num-gpus-per-engine, and pushes of weights do not "
            "reach them. Copies are engines here: remove it and raise --rollout-num-gpus. For data "
            "parallelism within an engine's attention add --sglang-enable-dp-attention."
        )
    for option, size in ((flag, attention), ("--sglang-ep-size", given("ep_size") or 1)):
        if num_gpus % size:
            raise ValueError(
                f"{option} is {size}{where}, which does not divide the {num_gpus} GPUs of an engine "
                "(--rollout-num-gpus-per-engine): use a divisor of that."
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


def lacks_images_of(model_type: str, videos: bool = False) -> bool:
    """Return whether the engine cannot serve this type of vision-language model, or its videos."""
    return videos or model_type in ("idefics3", "smolvlm")
