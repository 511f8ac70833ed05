"""Builds Megatron's configuration from the HF config and the flags; no architecture flag is needed.

`--hf-checkpoint` defines the architecture; a Megatron flag that contradicts it is an error that names both.
"""

import dataclasses
import importlib
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slime.arguments import Args
from slime.backends.families import family_of, num_mtp_heads, register_configs
from slime.backends.megatron.megatron_groups import PARALLEL_SIZES
from slime.backends.megatron.modules.mla import MLAConfig
from slime.backends.megatron.modules.sparse_attention import SparseMLAConfig
from slime.backends.megatron.modules.wide_norm import WideNormConfig
from slime.utils.models.pipeline_stages import layers_of_chunks

# Fields of TransformerConfig that change what a layer computes and that none of these models uses: our
# attention and norms do not read some of them, and would leave them without effect.
_UNUSED = """
    activation_func_clamp_value glu_linear_offset layernorm_zero_centered_gamma add_qkv_bias
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm attention_output_gate
    experimental_attention_variant linear_attention_freq is_hybrid_model no_rope_freq mrope_section qk_clip
    qk_l2_norm qk_layernorm log_max_attention_logit rotary_interleaved multi_latent_attention softmax_scale
    softmax_type window_size window_attn_skip_freq num_moe_experts moe_apply_probs_on_input moe_latent_size
    moe_shared_expert_gate moe_shared_expert_intermediate_size moe_router_enable_expert_bias
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
""".split()  # noqa: SIM905 - one name per line would fill a screen
# Megatron has others (`moe_act`, `mla_up_proj`), which have no effect here.
_RECOMPUTED = ("core_attn", "mlp", "layernorm", "moe", "shared_experts")
# Fields of scaled rotations with their defaults; meaningless without scaling.
_ROPE_FACTS = {
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
# Flags that are fields of Megatron's optimizer under the same names.
_OPTIMIZER_FLAGS = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    "overlap_param_gather",
)
TE_KERNELS = ("flash", "fused", "unfused")


def read_hf_config(path: str) -> Any:
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig

    register_configs()
    config = AutoConfig.from_pretrained(path)
    family = family_of(config)
    if family.nested:
        # The model is built from the text model's config, under the type that its checkpoint has.
        whole, config = config, config.get_text_config()
        config.model_type, config.tie_word_embeddings = family.model_type, whole.tie_word_embeddings
    known = family.layer_kinds
    kinds = sorted(set(config.get_text_config().to_dict().get("layer_types") or ()) - set(known))
    if kinds:
        raise ValueError(
            f"{config.model_type} has {', '.join(kinds)} layers: --train-backend megatron computes "
            f"{', '.join(known)} there; use --train-backend fsdp."
        )
    return config


def rotary_embedding(hf_config: Any) -> nn.Module:
    """Return the HF model's own rotary embedding: cos and sin of positions, with the config's scaling."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoModelForCausalLM

    models = AutoModelForCausalLM._model_mapping
    # Our own config class is a subclass of the one whose model it describes.
    known = next(kind for kind in type(hf_config).__mro__ if kind in models)
    module = importlib.import_module(models[known].__module__)
    names = (name for name in vars(module) if name.endswith("RotaryEmbedding"))
    classes = [name for name in names if not name.endswith("VisionRotaryEmbedding")]
    assert len(classes) == 1, f"{module.__name__} has {len(classes)} rotary embeddings, expected one"
    return getattr(module, classes[0])(config=hf_config)


def _mtp_settings(args: Args, hf_config: Any) -> dict[str, Any]:
    if not args.enable_mtp_training or not num_mtp_heads(hf_config):
        return {}
    heads = num_mtp_heads(hf_config)
    return {"mtp_num_layers": heads, "mtp_loss_scaling_factor": args.mtp_loss_scaling_factor}


def check_mtp(args: Args, hf_config: Any) -> None:
    if not args.enable_mtp_training:
        return
    if not num_mtp_heads(hf_config) or family_of(hf_config).mtp_prefix is None:
        raise ValueError(
            f"--enable-mtp-training is set, but --hf-checkpoint {args.hf_checkpoint} "
            f"({hf_config.model_type}) has no MTP heads, which predict further tokens: remove the flag."
        )
    if num_mtp_heads(hf_config) > 1 and family_of(hf_config).mtp_layer is not None:
        raise ValueError(
            f"--enable-mtp-training: {args.hf_checkpoint} has {num_mtp_heads(hf_config)} MTP layers "
            f"behind one projection; of a {hf_config.model_type} only one can be trained. Remove the flag."
        )
    if args.context_parallel_size > 1 or hf_config.tie_word_embeddings:
        raise ValueError(
            "--enable-mtp-training needs --context-parallel-size 1 and a model whose output matrix is not "
            "its embedding."
        )


def transformer_config(
    args: Args, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    settings = family_of(hf_config).settings(hf_config) | _mtp_settings(args, hf_config)
    given = args.megatron_config
    _check_architecture(given, architecture(hf_config) | _mtp_settings(args, hf_config), args.hf_checkpoint)
    facts = hub_facts(hf_config)
    described = facts | settings  # compared with the flags above: equal, or equivalent
    overrides = _fields_of(MLAConfig, {name: given[name] for name in given if name not in described})
    kernel = args.attention_backend if args.attention_backend in TE_KERNELS else "auto"
    staged = args.pipeline_model_parallel_size > 1
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    values = {
        **{name: getattr(args, name) for name in PARALLEL_SIZES},
        "sequence_parallel": args.sequence_parallel,
        # TransformerEngine's kernel, if its attention is used; it chooses for the other values.
        "attention_backend": AttnBackend[kernel],
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        # Has an effect only with a coefficient, whose default is 0.
        "moe_router_load_balancing_type": "aux_loss",
        # Engines route with the bias from pretraining, so it is not updated.
        "moe_router_bias_update_rate": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype if staged else None,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": staged,
        # Two stages that hold two chunks each exchange several messages at once; Megatron mixes up a batch.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Gradients are summed, never averaged: the loss is already divided by the counts of the whole step.
        "calculate_per_token_loss": True,
        # Weights are read from the checkpoint; drawing random ones first would only cost time.
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "deterministic_mode": args.deterministic_mode,
        **_recompute(args),
    }
    kinds = {
        "index_topk": SparseMLAConfig,
        "multi_latent_attention": MLAConfig,
        "norms_all_heads": WideNormConfig,
    }
    kind = next((kinds[name] for name in kinds if name in settings), TransformerConfig)
    config = kind(**settings | values | overrides)
    _check_overlap(config)
    return config


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return flags that may only repeat the config: its architecture, and features that no family has."""
    unused = {
        field.name: field.default for field in dataclasses.fields(TransformerConfig) if field.name in _UNUSED
    }
    return unused | family_of(hf_config).settings(hf_config) | hub_facts(hf_config)


def hub_facts(hf_config: Any) -> dict[str, Any]:
    """Return facts of the config that are flags of Megatron's command line but fields of no configuration."""
    rope = hf_config.rope_parameters
    norms = {"qk_layernorm": True} if "norms_all_heads" in family_of(hf_config).settings(hf_config) else {}
    return norms | {
        "vocab_size": hf_config.vocab_size,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": not hf_config.tie_word_embeddings,
        **dict.fromkeys(
            ("post_self_attn_layernorm", "post_mlp_layernorm"), family_of(hf_config).branch_norms
        ),
        # How positions beyond the trained ones are rotated: the model's own embedding does it.
        "rotary_scaling_factor": rope.get("factor", 1.0),
        **{name: rope.get(name, default) for name, default in _ROPE_FACTS.items()},
    }


def _check_architecture(given: dict[str, Any], known: dict[str, Any], path: str | None) -> None:
    for name, value in given.items():
        if name in known and _plain(name, value, known) != _plain(name, known[name], known):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, but the config of --hf-checkpoint {path} says "
                f"{known[name]}: the architecture comes from the checkpoint; remove the flag."
            )


def _plain(name: str, value: Any, known: dict[str, Any]) -> Any:
    """Return one form for values that can be written in several."""
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(layer % value == 0) for layer in range(known["num_layers"])]
    if name == "linear_attention_freq" and isinstance(value, int):
        return [int((layer + 1) % value != 0) for layer in range(known["num_layers"])]
    if name in ("moe_router_num_groups", "moe_router_group_topk") and value == 1:
        return None
    if name in _ROPE_FACTS and known["rotary_scaling_factor"] == 1.0:
        return None
    if name == "kv_channels" and known.get("multi_latent_attention"):
        return None  # such a model has separate widths for queries, keys and values
    return value


def optimizer_config(args: Args, dtype: torch.dtype) -> OptimizerConfig:
    values = {
        **{name: getattr(args, name) for name in _OPTIMIZER_FLAGS},
        "sgd_momentum": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": _distributed_optimizer(args),
    }
    return OptimizerConfig(**(values | _fields_of(OptimizerConfig, args.megatron_config)))


def ddp_config(args: Args) -> DistributedDataParallelConfig:
    values = {
        "grad_reduce_in_fp32": args.main_grads_dtype == "fp32",
        "use_distributed_optimizer": _distributed_optimizer(args),
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "overlap_param_gather": args.overlap_param_gather,
    }
    return DistributedDataParallelConfig(
        **(values | _fields_of(DistributedDataParallelConfig, args.megatron_config))
    )


def _recompute(args: Args) -> dict[str, Any]:
    """Return settings: recompute whole layers, or the attention of each, unless finer flags are given."""
    if args.activation_checkpointing == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if args.activation_checkpointing == "selective":
        modules = recompute_modules(args)
        unknown = sorted(set(modules) - set(_RECOMPUTED))
        if unknown:
            raise ValueError(
                f"--recompute-modules names {', '.join(unknown)}: there are {', '.join(_RECOMPUTED)} here."
            )
        return {"recompute_granularity": "selective", "recompute_modules": modules or None}
    return {}


def recompute_modules(args: Args) -> list[str]:
    """Return the parts of a layer that --recompute-modules names."""
    return args.megatron_config.get("recompute_modules") or []


def _distributed_optimizer(args: Args) -> bool:
    """Return whether moments are sharded over data-parallel ranks, which only Adam allows."""
    return args.use_distributed_optimizer and args.optimizer == "adam"


def _fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _check_overlap(config: TransformerConfig) -> None:
    if config.virtual_pipeline_model_parallel_size is None or config.overlap_p2p_comm:
        return
    if config.pipeline_model_parallel_size == 2:
        raise ValueError(
            "--virtual-pipeline-model-parallel-size with --pipeline-model-parallel-size 2 and "
            "overlap_p2p_comm off: megatron-core then mixes up messages between the two stages and computes "
            "a wrong loss without an error; leave overlap_p2p_comm on."
        )


def check_layout(args: Args, hf_config: Any, *, world_size: int, device: torch.device) -> None:
    """Refuse sizes that Megatron would refuse late, with unclear errors, or not at all."""
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    settings = family_of(hf_config).settings(hf_config)
    experts, layers = settings.get("num_moe_experts"), settings["num_layers"]
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"{world_size} trainer ranks are not a multiple of tensor {tp} x pipeline {pp} x context {cp} "
            f"parallelism = {tp * pp * cp}: change --actor-num-gpus-per-node or the parallel sizes."
        )
    if settings["num_attention_heads"] % tp:
        raise ValueError(
            f"--tensor-model-parallel-size is {tp}, but the model has {settings['num_attention_heads']} "
            "attention heads: use a divisor of that."
        )
    _check_delta_nets(hf_config.model_type, settings, tp, cp)
    longest, limit = settings.get("index_topk"), args.rollout_max_context_len
    if cp > 1 and longest is not None and (limit is None or limit > longest):
        raise ValueError(
            f"--context-parallel-size is {cp}, but a {hf_config.model_type} selects keys for samples of more "
            f"than {longest} tokens (index_topk), which must be on one rank: use 1, or "
            f"--rollout-max-context-len {longest}."
        )
    if settings.get("norms_all_heads") and settings["num_query_groups"] % tp:
        raise ValueError(
            f"--tensor-model-parallel-size is {tp}, but a {hf_config.model_type} has one norm over all "
            f"its {settings['num_query_groups']} key-value heads: use a divisor of that."
        )
    layers_of_chunks(layers, pp, vpp or 1, args.megatron_config)
    if vpp is not None and pp == 1:
        raise ValueError(
            "--virtual-pipeline-model-parallel-size needs --pipeline-model-parallel-size of at least 2."
        )
    if experts is None:
        _refuse_experts(args, hf_config)
    else:
        _check_experts(args, experts, world_size, device)


def _check_delta_nets(model_type: str, settings: dict[str, Any], tp: int, cp: int) -> None:
    """Refuse sizes that cannot share the heads of gated delta nets or of gated attention."""
    heads = settings.get("linear_num_key_heads")
    if heads is None:
        return
    if heads % (tp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} and --context-parallel-size {cp}: the gated delta nets of a "
            f"{model_type} are split by their {heads} key heads over both; use sizes whose product divides "
            "them."
        )
    if tp > settings["num_query_groups"]:
        raise ValueError(
            f"--tensor-model-parallel-size is {tp}, but a {model_type} has {settings['num_query_groups']} "
            "key-value heads, and megatron-core cannot share one between ranks where attention has an output "
            f"gate: use at most {settings['num_query_groups']}."
        )


def _check_experts(args: Args, experts: int, world_size: int, device: torch.device) -> None:
    """Check the layout of mixtures of experts, for `check_layout`."""
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if experts % ep:
        raise ValueError(
            f"--expert-model-parallel-size is {ep}, which does not divide the model's {experts} experts."
        )
    if world_size % (etp * ep * pp):
        raise ValueError(
            f"{world_size} trainer ranks are not a multiple of expert-tensor {etp} x expert {ep} x pipeline "
            f"{pp} parallelism: use smaller sizes."
        )
    if tp > 1 and not args.sequence_parallel:
        raise ValueError(
            "a mixture of experts with --tensor-model-parallel-size above 1 needs --sequence-parallel: "
            "Megatron's dispatcher expects tokens split over the tensor-parallel ranks."
        )
    if etp > 1 and device.type == "cpu":
        raise ValueError(
            f"--expert-tensor-parallel-size is {etp}: it gathers unequal numbers of tokens, which gloo (CPU) "
            "cannot do; use 1 here."
        )
    if args.moe_token_dispatcher_type == "allgather" and pp > 1:
        raise ValueError(
            "--moe-token-dispatcher-type allgather with --pipeline-model-parallel-size above 1: "
            "megatron-core has it only for micro-batches of one length, and packed ones differ; use alltoall."
        )
    if pp > 1 and "moe" in recompute_modules(args):
        raise ValueError(
            "--recompute-modules moe with --pipeline-model-parallel-size above 1: when experts alone are "
            "computed again, they no longer know which micro-batch they compute; use --recompute-granularity "
            "full."
        )


def _refuse_experts(args: Args, hf_config: Any) -> None:
    """Refuse flags that do nothing for a dense model."""
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    given = [name for name in sizes if getattr(args, name) > 1]
    given += [n for n in ("use_routing_replay", "use_rollout_routing_replay") if getattr(args, n)]
    given += [name for name in args.megatron_config if name.startswith("moe_")]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ValueError(f"{option} is for mixtures of experts; {hf_config.model_type} is dense: remove it.")


def same_architecture(one: Any, other: Any) -> bool:
    """Return whether the weights of one HF config fit a model built from another."""
    settings = family_of(other).settings(other)
    return (
        one.model_type == other.model_type
        and one.tie_word_embeddings == other.tie_word_embeddings
        and family_of(one).settings(one) == settings
    )
