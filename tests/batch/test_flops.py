"""Operations of a forward pass, against the matrices of transformers' own models."""

import re

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime.batch.flops import ModelShape, Stream, pass_flops

SIZES = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=96)
EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2)
LATENT = dict(kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=12, qk_nope_head_dim=8, n_group=1, topk_group=1)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=4),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, **EXPERTS, **LATENT,
        q_lora_rank=16, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
    "deepseek_v3 without a query rank": DeepseekV3Config(
        **SIZES, **EXPERTS, **LATENT,
        q_lora_rank=None, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=2
    ),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=3
    ),
    "olmoe": OlmoeConfig(**SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "phimoe": PhimoeConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": MiniMaxM2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2_moe, every second layer": Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, num_experts=4, shared_expert_intermediate_size=20,
        decoder_sparse_step=2
    ),
    "qwen3_moe with a dense layer": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=4, mlp_only_layers=[1]
    ),
    "dots1": Dots1Config(
        **SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, n_routed_experts=4, n_shared_experts=2,
        first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SIZES, num_key_value_heads=2, moe_intermediate_size=24, moe_k=3, moe_num_experts=4,
        moe_num_shared_experts=1, moe_layer_start_index=1
    ),
}  # fmt: skip
# Matrices of a router, and weights of norms and gates.
NO_MATRIX = re.compile(r"(gate|router|shared_expert_gate)\.weight$|norm")


def matrices_of_one_token(model: nn.Module, chosen: int) -> int:
    """Elements of every matrix that a token meets; of routed experts only as
    many as it chooses. Routers are left out.
    """
    total = model.get_output_embeddings().weight.numel()
    for name, parameter in model.base_model.named_parameters():
        if "embed_tokens" in name or parameter.dim() < 2 or NO_MATRIX.search(name) or name.endswith("bias"):
            continue
        total += parameter[0].numel() * chosen if parameter.dim() == 3 else parameter.numel()
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_those_of_the_model(name):
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_hf_config(config)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", 0)
    assert shape.matrices == matrices_of_one_token(model, chosen)
    assert shape.output == model.get_output_embeddings().weight.numel()


def test_attention_is_counted_for_each_pair_of_a_causal_mask():
    config = CONFIGS["llama"]
    shape = ModelShape.from_hf_config(config)
    length, heads, width = 64, 4, 8
    pairs = length * length / 2
    scores_and_values = 3 * heads * 2 * (width + width) * pairs
    stream = Stream.of(torch.arange(length), length)
    assert pass_flops(shape, stream) == 2 * shape.matrices * length + scores_and_values


def test_a_document_whose_tokens_are_all_predicted_costs_a_forward_pass():
    shape = ModelShape(matrices=1000, attention=10, output=300)
    assert Stream.of(torch.arange(64), 64) == Stream(64, 64 * 64, 64)
    assert pass_flops(shape, Stream.of(torch.arange(64), 64)) == 2 * 1000 * 64 + 10 * 64 * 64


def test_the_output_matrix_is_counted_where_tokens_are_predicted():
    shape = ModelShape(matrices=1000, attention=0, output=300)
    assert pass_flops(shape, Stream.of(torch.arange(64), 4)) == 2 * (700 * 64 + 300 * 4)


def test_a_backward_pass_counts_gradients_of_weights_that_train():
    shape, stream = ModelShape(matrices=1000, attention=10), Stream.of(torch.arange(8), 8)
    products, scores = 2 * 1000 * 8, 10 * 64
    assert pass_flops(shape, stream, backward=True) == 3 * (products + scores)
    assert pass_flops(shape, stream, backward=True, trained=0.0) == 2 * products + 3 * scores
