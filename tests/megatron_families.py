"""Shared by the tests of the Megatron model families: a tiny random checkpoint of each, as the hub would hold it."""

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
    pad_token_id=None,
)
EXTRA = {
    "glm4": dict(
        head_dim=16,
        attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
}


def make_checkpoint(path, kind: str, **changes) -> str:
    """Weights are drawn so that every tensor matters: norms around one, biases around zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | EXTRA[kind] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    return str(path)
