"""Flags and rules of the Megatron trainer; other fields of its configuration pass through (passthrough/)."""

import importlib.util
from dataclasses import dataclass

from slime.arguments.core.draft import Draft, Refused
from slime.arguments.core.flag import flag, needs, option_of, specs_of
from slime.arguments.groups.objectives import POLICY_LOSS
from slime.catalog.backends import BACKENDS
from slime.utils.models.model_config import read_config
from slime.utils.models.pipeline_stages import layers_of_chunks, parts_of_layout

# Fields of megatron-core's configuration that users cannot set, and what decides them.
OWNED = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "fp16"), "--dtype decides it"),
    **dict.fromkeys(("fp8", "fp4"), "this version trains in 32 or 16 bit"),
    **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths"), "slime decides it"),
    "moe_enable_routing_replay": "use --use-routing-replay or --use-rollout-routing-replay",
    **dict.fromkeys(
        ("decoupled_lr", "decoupled_min_lr"), "all parameters have one rate, --lr and its schedule"
    ),
    "use_megatron_fsdp": "use --train-backend fsdp",
}
DEEPEP_FIELDS = ("moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms")
# Sets of tokens over which the load of experts is balanced: micro-batches, or samples.
BALANCING = ("none", "aux_loss", "seq_aux_loss")

# Flags for Megatron's layout and way of computing: none of them changes what is trained.
LAYOUT = """
    tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
    expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel use_distributed_optimizer
    overlap_grad_reduce overlap_param_gather moe_token_dispatcher_type attention_backend
""".split()  # noqa: SIM905 - a paragraph is easier to scan
ON_BOTH = ("use_rollout_routing_replay",)  # flags that both trainers read
# Fields of Megatron's configuration that would train another policy, and their neutral values.
TRAINED_FIELDS = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "moe_router_bias_update_rate"), 0.0),
    "moe_aux_loss_coeff": 0.0,
    **dict.fromkeys(("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor"), None),
}


# -- when flags have an effect
MTP = needs("enable_mtp_training")


@dataclass
class MegatronFlags:
    """Megatron trainer."""

    pipeline_model_parallel_size: int = flag(1, "pipeline stages over which the layers are spread", ge=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "chunks of layers per stage", ge=2, alias="--num-virtual-stages-per-pipeline-rank"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers per chunk, instead of the number of chunks", ge=1
    )
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of every layer", ge=1)
    expert_tensor_parallel_size: int = flag(1, "ranks that share every matrix of an expert", ge=1)
    sequence_parallel: bool = flag(False, "tensor-parallel ranks also share tokens between products")
    use_distributed_optimizer: bool = flag(
        True, "keep Adam's moments whole on every data-parallel rank", off="--no-use-distributed-optimizer"
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "gather updated parameters during the next forward pass")
    moe_token_dispatcher_type: str = flag(
        "alltoall", "how tokens travel to their experts", choices=("alltoall", "allgather", "flex")
    )
    attention_backend: str = flag(
        "auto",
        "local: slime's attention; flash, fused, unfused: a kernel of TransformerEngine; auto: "
        "TransformerEngine if it is installed and agrees with slime's",
        choices=("auto", "local", "flash", "fused", "unfused"),
    )
    use_routing_replay: bool = flag(
        False,
        "training passes send tokens to the experts that the pass of the old policy chose",
        only_with=POLICY_LOSS,
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "passes of the policy send tokens to the experts that the engine chose while it sampled",
        only_with=POLICY_LOSS,
    )
    enable_mtp_training: bool = flag(
        False, "train the checkpoint's heads that predict further tokens, without changing the policy"
    )
    mtp_loss_scaling_factor: float = flag(0.2, "weight of the loss of the MTP heads", gt=0, only_with=MTP)
    custom_megatron_init_path: str | None = flag(None, "function called on every rank after its groups exist")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "function called before each pass that records log-probs"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None, "function called before each optimizer step of the policy"
    )
    custom_model_provider_path: str | None = flag(None, "function that builds the model of a pipeline stage")


def choose_trainer(draft: Draft) -> None:
    """Choose Megatron if its flags are given, as in slime scripts; else FSDP if it must build the family."""
    flags = [spec.name for spec in specs_of(MegatronFlags) if draft.was_given(spec.name)]
    given = [*draft.megatron_config, *flags]
    if not given or draft.was_given("train_backend"):
        return
    if (kind := _family_not_built(draft, "megatron")) is not None:
        _train_without_megatron(draft, kind)
        return
    option = option_of(given[0])
    draft.derive("train_backend", "megatron", f"{option} is a flag of Megatron's")
    draft.warn(f"--train-backend megatron: {option} is a flag of Megatron's, and no trainer was named.")
    if not draft.was_given("lr_decay_style") and not draft.debug_rollout_only:
        draft.warn(
            "--lr-decay-style is not given: the rate stays constant here, where Megatron's own command line "
            "lets it decay linearly; say which."
        )


def _family_not_built(draft: Draft, backend: str) -> str | None:
    """Return the type of a local model that the trainer cannot build; None: it can, or is unknown."""
    known = BACKENDS[backend].families
    if known is None or draft.hf_checkpoint is None or draft.custom_model_provider_path is not None:
        return None
    kind = read_config(draft.hf_checkpoint).get("model_type")
    return kind if kind is not None and kind not in known else None


def _train_without_megatron(draft: Draft, kind: str) -> None:
    """Use FSDP: drop flags for Megatron's way of computing; refuse flags that change what is trained."""
    why, fields = f"fsdp trains a {kind}", draft.megatron_config
    draft.derive("train_backend", "fsdp", f"Megatron does not build a {kind}")
    refused = [
        f"{option_of(name)} {value} changes what is trained, and --train-backend fsdp, which trains a {kind} "
        f"here, does not know it; leave it out or set it to {TRAINED_FIELDS[name]}."
        for name, value in fields.items()
        if name in TRAINED_FIELDS and value != TRAINED_FIELDS[name]
    ]
    left_out = [name for name in LAYOUT if draft.was_given(name)]
    for name in left_out:
        draft.derive(name, draft.specs[name].default, why)
    draft.derive("megatron_config", {}, why)
    instead = f" instead of {', '.join(map(option_of, left_out))}" if left_out else ""
    draft.warn(
        f"--train-backend fsdp: {draft.hf_checkpoint} is a {kind}, which Megatron does not build here. Its "
        f"architecture is that of its config, and it is sharded over all ranks of the trainer{instead}."
    )
    if refused:
        raise Refused(refused)


def megatron_trainer(draft: Draft) -> None:
    """Check Megatron's flags, before sizes are derived."""
    if not BACKENDS[draft.train_backend].takes_megatron_flags:
        given = [spec for spec in specs_of(MegatronFlags) if draft.was_given(spec.name)]
        given = [spec for spec in given if spec.name not in ON_BOTH]
        unread = [spec.option for spec in given if getattr(draft, spec.name) != spec.default]
        if unread:
            why = "is set, but only --train-backend megatron reads it; remove it."
            raise Refused([f"{option} {why}" for option in unread])
        return
    if importlib.util.find_spec("megatron") is None:
        raise ValueError("--train-backend megatron needs megatron-core: pip install 'slime-rl[megatron]'.")
    fields = draft.megatron_config
    if "mtp_num_layers" in fields and not draft.enable_mtp_training:
        draft.idle.append(
            "--mtp-num-layers is given without --enable-mtp-training: the heads are not trained."
        )
        fields = {name: value for name, value in fields.items() if name != "mtp_num_layers"}
        draft.set("megatron_config", fields, draft.sources["megatron_config"])
    for name in fields:
        if name in OWNED:
            raise ValueError(f"{option_of(name)} cannot be given: {OWNED[name]}.")
    if draft.main_grads_dtype == "bf16" and fields.get("grad_reduce_in_fp32"):
        raise ValueError(
            "--main-grads-dtype is bf16 with --accumulate-allreduce-grads-in-fp32: gradients add up in one "
            "precision; keep one of them."
        )
    if draft.sequence_parallel and draft.tensor_model_parallel_size == 1:
        draft.idle.append("--sequence-parallel is set, but --tensor-model-parallel-size is 1: it is off.")
        draft.derive("sequence_parallel", False, "tensor_model_parallel_size is 1")
    if draft.overlap_param_gather and not (draft.overlap_grad_reduce and draft.use_distributed_optimizer):
        raise ValueError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce."
        )
    _virtual_stages(draft)
    _share_layers(draft)
    _dispatcher(draft)
    _experts(draft)


def _virtual_stages(draft: Draft) -> None:
    """Derive the number of chunks of a pipeline stage from the layers per chunk and the number of layers."""
    each, stages = draft.num_layers_per_virtual_pipeline_stage, draft.pipeline_model_parallel_size
    if each is None:
        layout = str(draft.megatron_config.get("pipeline_model_parallel_layout") or "")
        chunks = len(parts_of_layout(layout)) // stages
        if layout and chunks > 1 and draft.virtual_pipeline_model_parallel_size is None:
            draft.derive("virtual_pipeline_model_parallel_size", chunks, "--pipeline-model-parallel-layout")
        return
    option = f"--num-layers-per-virtual-pipeline-stage is {each}"
    if draft.virtual_pipeline_model_parallel_size is not None:
        raise ValueError(f"{option} and --num-virtual-stages-per-pipeline-rank are both set; keep one.")
    config = read_config(draft.hf_checkpoint) if draft.hf_checkpoint else {}
    layers = config.get("num_hidden_layers") or draft.megatron_config.get("num_layers")
    if layers is None or layers % (stages * each):
        known = (
            f"{layers} layers on {stages} stage(s) do not divide like this"
            if layers
            else "the number of layers is unknown without a config"
        )
        raise ValueError(f"{option}: {known}; use --num-virtual-stages-per-pipeline-rank.")
    chunks = layers // (stages * each)
    if chunks > 1:
        draft.derive("virtual_pipeline_model_parallel_size", chunks, "num_layers_per_virtual_pipeline_stage")


def _share_layers(draft: Draft) -> None:
    """Refuse stages that cannot share the layers of the model, if its config is on this machine."""
    config = read_config(draft.hf_checkpoint) if draft.hf_checkpoint else {}
    layers = config.get("text_config", config).get("num_hidden_layers")
    if isinstance(layers, int):
        chunks = draft.virtual_pipeline_model_parallel_size or 1
        layers_of_chunks(layers, draft.pipeline_model_parallel_size, chunks, draft.megatron_config)


def model_family(draft: Draft) -> None:
    """Refuse a family that the trainer does not build, if the config of the model is on this machine."""
    kind = None if draft.debug_rollout_only else _family_not_built(draft, draft.train_backend)
    if kind is not None:
        raise ValueError(
            f"--hf-checkpoint {draft.hf_checkpoint} is a {kind}, a family that --train-backend "
            f"{draft.train_backend} does not build; use --train-backend fsdp."
        )


def _dispatcher(draft: Draft) -> None:
    """Use DeepEP if it is installed and ranks share experts; the way tokens travel changes no result."""
    alone = draft.expert_model_parallel_size * draft.expert_tensor_parallel_size == 1
    if draft.moe_token_dispatcher_type != "flex":
        return
    if alone or importlib.util.find_spec("deep_ep") is None:
        why = "no ranks share experts" if alone else "DeepEP (the package deep_ep) is not installed"
        draft.idle.append(f"--moe-token-dispatcher-type is flex, but {why}: it is alltoall.")
        draft.derive("moe_token_dispatcher_type", "alltoall", why)
        fields = {n: value for n, value in draft.megatron_config.items() if n not in DEEPEP_FIELDS}
        draft.set("megatron_config", fields, draft.sources["megatron_config"])


def _experts(draft: Draft) -> None:
    balancing = draft.megatron_config.get("moe_router_load_balancing_type", "aux_loss")
    if balancing not in BALANCING:
        known = ", ".join(BALANCING)
        raise ValueError(
            f"--moe-router-load-balancing-type is {balancing}: over packed samples there are {known}."
        )
    if draft.use_routing_replay and draft.use_rollout_logprobs and not draft.use_rollout_routing_replay:
        raise ValueError(
            "--use-routing-replay with --use-rollout-logprobs: no pass of the old policy runs, so nothing "
            "is recorded; use --use-rollout-routing-replay."
        )
