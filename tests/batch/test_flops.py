"""Operations of a forward pass, against the matrices of transformers' own models."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime.batch.flops import ModelShape, forward_flops

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
}  # fmt: skip


def matrices_of_one_token(model: nn.Module, chosen: int) -> int:
    """Elements of every matrix that a token meets; of routed experts only as
    many as it chooses. Routers are left out.
    """
    total = model.get_output_embeddings().weight.numel()
    for name, parameter in model.base_model.named_parameters():
        if "embed_tokens" in name or parameter.dim() < 2 or name.endswith("gate.weight"):
            continue
        total += parameter[0].numel() * chosen if parameter.dim() == 3 else parameter.numel()
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_those_of_the_model(name):
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_hf_config(config)
    assert shape.matrices == matrices_of_one_token(model, getattr(config, "num_experts_per_tok", 0))


def test_attention_is_counted_for_each_pair_of_a_causal_mask():
    config = CONFIGS["llama"]
    shape = ModelShape.from_hf_config(config)
    length, heads, width = 64, 4, 8
    pairs = length * length / 2
    scores_and_values = 3 * heads * 2 * (width + width) * pairs
    assert forward_flops(shape, length) == 2 * shape.matrices * length + scores_and_values
