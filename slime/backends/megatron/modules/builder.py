"""Builds this rank's part of the model: one chunk, or several where pipeline stages are interleaved."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.families import family_of
from slime.backends.megatron.hooks import provide_model
from slime.backends.megatron.modules.grouped_experts import GroupedExperts
from slime.backends.megatron.modules.layer_specs import block_spec
from slime.backends.megatron.modules.layers import PackedCoreAttention
from slime.backends.megatron.modules.model import PackedGPTModel, ScalarHead
from slime.backends.megatron.modules.mtp import mtp_spec
from slime.backends.megatron.modules.sparse_attention import Indexer

# Dimension of a module's weight that is split over tensor-parallel ranks.
_CUT = ((ColumnParallelLinear, 0), (VocabParallelEmbedding, 0), (RowParallelLinear, 1))


def build_chunks(
    config: TransformerConfig,
    hf_config: Any,
    device: torch.device,
    *,
    attention: type[PackedCoreAttention],
    scalar: bool = False,
    provider: str | None = None,
) -> list[PackedGPTModel]:
    """Build the chunks. `scalar`: a critic or reward model, with one number per token. `provider`: a hook."""
    if scalar:
        # A critic predicts no tokens, and has its own configuration.
        config.mtp_num_layers = None
    virtual_stages = config.virtual_pipeline_model_parallel_size
    numbers = range(virtual_stages) if virtual_stages else [None]
    chunks = [_chunk(config, hf_config, vp_stage, attention, scalar, provider) for vp_stage in numbers]
    for chunk in chunks:
        chunk.to(device)
        if config.bf16:
            chunk.bfloat16()
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    # Before weights are read: the bias keeps its precision.
                    module._maintain_float32_expert_bias()
                elif isinstance(module, Indexer):
                    module.weights_proj.float()
    return chunks


def _chunk(
    config: TransformerConfig,
    hf_config: Any,
    vp_stage: int | None,
    attention: type[PackedCoreAttention],
    scalar: bool,
    provider: str | None,
) -> PackedGPTModel:
    tp = config.tensor_model_parallel_size
    branch_norms = family_of(hf_config).branch_norms
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }

    mtp = None
    if config.mtp_num_layers and ends["post_process"]:
        mtp = mtp_spec(config, attention=attention, branch_norms=branch_norms)
    layers = block_spec(config, vp_stage, attention=attention, branch_norms=branch_norms)

    def build() -> PackedGPTModel:
        return PackedGPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=hf_config.vocab_size + -hf_config.vocab_size % tp,
            max_sequence_length=hf_config.max_position_embeddings,
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and not scalar,
            # The stream has the angles.
            position_embedding_type="none",
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
            **ends,
        )

    model = provide_model(provider, config, build, vp_stage=vp_stage, **ends) if provider else build()
    model.real_vocab_size = hf_config.vocab_size
    model.padding_id = getattr(hf_config, "pad_token_id", None)  # not every config of the hub has one
    model.mtp_losses = []
    if scalar and model.post_process:
        model.output_layer = ScalarHead(config)
    _mark_cut_weights(model)
    return model


def _mark_cut_weights(model: PackedGPTModel) -> None:
    """Mark weights that are split over ranks, as Megatron does only when it initialises them.

    Unmarked, the gradient norm would miss the parts of other ranks.
    """
    for module in model.modules():
        for kind, dim in _CUT:
            if isinstance(module, kind) and module.weight is not None:
                _mark(module, dim, model.config)


def _mark(
    module: ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear,
    dim: int,
    config: TransformerConfig,
) -> None:
    repeated = (
        getattr(module, "is_expert", False)
        and config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == 1 < config.tensor_model_parallel_size
    )
    if not hasattr(module.weight, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(module.weight, not repeated, dim, 1)
    if repeated:
        # Every tensor-parallel rank holds the whole expert and sees its slice of the sequence. Without expert
        # parallelism Megatron treats such weights as split and would not sum their gradients.
        module.weight.sequence_parallel = True


def wrap_for_training(
    config: TransformerConfig, ddp: DistributedDataParallelConfig, chunks: list[PackedGPTModel]
) -> list[DistributedDataParallel]:
    """Wrap each chunk with gradient buffers, and tell the schedules how and when to reduce gradients."""
    wrapped = [
        DistributedDataParallel(
            config, ddp, chunk, disable_bucketing=index > 0 and not ddp.overlap_grad_reduce
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GroupedExperts):
                module.adds_gradients = not ddp.overlap_grad_reduce
    # The loss is already divided: without a token count, gradients are only summed.
    config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: finalize_model_grads(
        model, None, **kwargs
    )
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped
