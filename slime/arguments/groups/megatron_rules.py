"""Rules of the Megatron trainer: what it does not build, and flags that only it reads."""

import importlib.util

from slime.arguments.all_flags import all_specs
from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import specs_of
from slime.arguments.passthrough.megatron import MegatronFlags
from slime.catalog.backends import BACKENDS

# Fields of megatron-core's configuration that are not the user's to set, and what decides them.
OWNED = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "--dtype decides it"),
    **dict.fromkeys(("fp8", "fp4"), "this version trains in 32 or 16 bit"),
    **dict.fromkeys(
        (
            "calculate_per_token_loss",
            "variable_seq_lengths",
            "perform_initialization",
            "use_cpu_initialization",
        ),
        "slime decides it",
    ),
    "moe_router_fusion": "it needs a part of TransformerEngine that this version does not use",
    "moe_enable_routing_replay": "use --use-routing-replay or --use-rollout-routing-replay",
    "moe_grouped_gemm": "it needs a part of TransformerEngine that this version does not use",
    **dict.fromkeys(
        ("decoupled_lr", "decoupled_min_lr"), "all parameters have one rate, --lr and its schedule"
    ),
    **dict.fromkeys(
        ("optimizer_cpu_offload", "use_precision_aware_optimizer"),
        "it needs TransformerEngine's Adam, and this version steps with torch's",
    ),
    "use_megatron_fsdp": "use --train-backend fsdp",
    "transformer_impl": "this version builds Megatron's own modules",
}

# Sets of tokens over which the load of experts is balanced: micro-batches, or samples.
BALANCING = ("none", "aux_loss", "seq_aux_loss")


def megatron_trainer(draft: Draft) -> None:
    """Runs before sizes are derived."""
    if not BACKENDS[draft.train_backend].takes_megatron_flags:
        for spec in specs_of(MegatronFlags):
            if draft.was_given(spec.name) and getattr(draft, spec.name) != spec.default:
                raise ValueError(
                    f"{spec.option} is set, but only --train-backend megatron reads it; remove it."
                )
        return
    if importlib.util.find_spec("megatron") is None:
        raise ValueError("--train-backend megatron needs megatron-core: pip install 'slime[megatron]'.")
    if "mtp_num_layers" in (draft.megatron_config or {}) and not draft.enable_mtp_training:
        raise ValueError(
            "--mtp-num-layers is given without --enable-mtp-training: heads that do not train are saved as "
            "they were read; remove it, or add that flag."
        )
    for name in draft.megatron_config or {}:
        option = "--" + name.replace("_", "-")
        if name in OWNED:
            raise ValueError(f"{option} cannot be given: {OWNED[name]}.")
        if name in all_specs():
            raise ValueError(f"--megatron-config sets {name}: give it as {option}.")
    _overlaps(draft)
    _experts(draft)


def _experts(draft: Draft) -> None:
    balancing = (draft.megatron_config or {}).get("moe_router_load_balancing_type", "aux_loss")
    if balancing not in BALANCING:
        raise ValueError(
            f"--moe-router-load-balancing-type is {balancing}: over packed samples there are "
            f"{', '.join(BALANCING)}."
        )
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(draft, name) and draft.loss_type != "policy_loss":
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option}: --loss-type {draft.loss_type} has no old policy to follow; remove it."
            )
    if draft.use_routing_replay and draft.use_rollout_logprobs and not draft.use_rollout_routing_replay:
        raise ValueError(
            "--use-routing-replay with --use-rollout-logprobs: no pass of the old policy runs, so nothing "
            "is recorded; use --use-rollout-routing-replay."
        )


def _overlaps(draft: Draft) -> None:
    if draft.overlap_param_gather and not (draft.overlap_grad_reduce and draft.use_distributed_optimizer):
        raise ValueError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce, in which "
            "it hides."
        )
