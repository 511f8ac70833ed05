"""Rules of the Megatron trainer: what it does not build, and flags that only it reads."""

import importlib.util

from slime.arguments.draft import Draft
from slime.arguments.flag import specs_of
from slime.arguments.groups import all_specs
from slime.arguments.megatron import MegatronFlags

# Fields of megatron-core's configuration that are not the user's to set, and what decides them.
OWNED = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "--dtype decides it"),
    **dict.fromkeys(("fp8", "fp4"), "this version trains in 32 or 16 bit"),
    **dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor"), "this version does not train prediction heads"),
    **dict.fromkeys(
        ("calculate_per_token_loss", "variable_seq_lengths", "perform_initialization", "use_cpu_initialization"),
        "slime decides it",
    ),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff"), "auxiliary losses of the router are not built in this version"
    ),
    "moe_grouped_gemm": "it needs TransformerEngine, which this version does not use",
    "use_megatron_fsdp": "use --train-backend fsdp",
    "transformer_impl": "this version builds Megatron's own modules",
}


def megatron_trainer(draft: Draft) -> None:
    """Runs before sizes are derived."""
    if draft.train_backend != "megatron":
        for spec in specs_of(MegatronFlags):
            if draft.was_given(spec.name) and getattr(draft, spec.name) != spec.default:
                raise ValueError(f"{spec.option} is set, but only --train-backend megatron reads it; remove it.")
        return
    if importlib.util.find_spec("megatron") is None:
        raise ValueError("--train-backend megatron needs megatron-core: pip install 'slime[megatron]'.")
    for name in draft.megatron_config or {}:
        option = "--" + name.replace("_", "-")
        if name in OWNED:
            raise ValueError(f"{option} cannot be given: {OWNED[name]}.")
        if name in all_specs():
            raise ValueError(f"--megatron-config sets {name}: give it as {option}.")
    _overlaps(draft)


def _overlaps(draft: Draft) -> None:
    if draft.overlap_param_gather and not (draft.overlap_grad_reduce and draft.use_distributed_optimizer):
        raise ValueError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce, in which it hides."
        )
