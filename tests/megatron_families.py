"""Shared by the tests of the Megatron model families: a tiny random checkpoint of each, as the hub would hold it."""

from pathlib import Path

import torch

COMMON = dict(
    vocab_size=127,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    # The default of some families is beyond this vocabulary.
    pad_token_id=None,
)
PARTLY_ROTATED = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.7,
)
EXPERTS = dict(
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
    first_k_dense_replace=1,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope_parameters=YARN,
)
# By the name used in the tests: HF's model type, and what differs from COMMON.
FAMILIES = {
    "glm4": ("glm4", dict(head_dim=16, attention_bias=True, rope_parameters=PARTLY_ROTATED)),
    "glm4_moe": (
        "glm4_moe",
        EXPERTS | dict(head_dim=16, attention_bias=True, use_qk_norm=True, rope_parameters=PARTLY_ROTATED),
    ),
    "deepseek_v3": ("deepseek_v3", EXPERTS | LATENT),
    "deepseek_v3_plain": (
        "deepseek_v3",
        EXPERTS | LATENT | dict(q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False),
    ),
}


def make_checkpoint(path: Path, name: str, **changes) -> str:
    """Weights are drawn so that every tensor matters: norms around one, biases around zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, extra = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | extra | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "inv_freq" not in n)):
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    return str(path)
