"""Shared by the tests of the Megatron model families: a tiny random checkpoint of each, as the hub would hold it."""

import json
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
    factor=16.0,
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
    num_nextn_predict_layers=1,
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
GLM4_MOE = EXPERTS | dict(head_dim=16, attention_bias=True, use_qk_norm=True, rope_parameters=PARTLY_ROTATED)
# By the name used in the tests: the HF model type that computes the reference, and what differs from COMMON.
FAMILIES = {
    "glm4": ("glm4", dict(head_dim=16, attention_bias=True, rope_parameters=PARTLY_ROTATED)),
    "mimo": ("qwen2", dict(num_nextn_predict_layers=1)),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe_plain": ("glm4_moe", GLM4_MOE | dict(use_qk_norm=False, attention_bias=False, n_group=1, topk_group=1)),
    "deepseek_v3": ("deepseek_v3", EXPERTS | LATENT),
    "deepseek_v3_plain": (
        "deepseek_v3",
        EXPERTS
        | LATENT
        | dict(q_lora_rank=None, rope_interleave=False, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    ),
}
# Tensors of a head that predicts a further token, which transformers' model classes do not have.
HEADS = {
    "mimo": ("model.mtp_layers.0.", "token_layernorm hidden_layernorm input_proj self_attn.q_proj final_layernorm"),
    "glm4_moe": ("model.layers.4.", "enorm hnorm eh_proj embed_tokens shared_head.norm shared_head.head mlp.gate"),
    "deepseek_v3": ("model.layers.4.", "enorm hnorm eh_proj self_attn.kv_a_proj_with_mqa shared_head.norm mlp.gate"),
}


def make_checkpoint(folder: Path, name: str, **changes) -> tuple[str, str]:
    """(checkpoint as the hub holds it, the same without further heads and of a type that transformers computes).

    Weights are drawn so that every tensor matters: norms around one, biases around zero.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, extra = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | extra | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and "inv_freq" not in key:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    reference, hub = folder / f"{name}-reference", folder / name
    model.save_pretrained(reference)
    if name not in HEADS:
        return str(reference), str(reference)
    _add_heads(reference, hub, name)
    return str(hub), str(reference)


def _add_heads(reference: Path, hub: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    hub.mkdir()
    config = json.loads((reference / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"model_type": name}))
    prefix, names = HEADS[name]
    tensors = load_file(reference / "model.safetensors")
    tensors |= {f"{prefix}{part}.weight": torch.randn(3, 5) for part in names.split()}
    if name != "mimo":
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.randn(8)
    save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})


def samples_of_tests():
    from trainer_helpers import random_samples

    return random_samples(3, 2, vocab=127, seed=3)


def family_cases(rank: int, world_size: int, cases: dict[str, tuple[str, dict]], folder: str) -> dict:
    """For each name -> (checkpoint, settings): log-probs, three GRPO steps, and an HF folder written before them."""
    from megatron_helpers import GRPO, megatron_args, train

    from slime.backends import fsdp, megatron
    from slime.backends.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    results = {}
    for name, (model, settings) in cases.items():
        settings = dict(settings)
        module = fsdp if settings.pop("fsdp", False) else megatron
        args = megatron_args(model, **(GRPO | dict(optimizer="sgd") | settings))
        found = {}

        def backend_of(args, *, module=module, found=found, name=name, **place):
            backend = module.create_backend(args, **place)
            batch = samples_to_batch(args, samples_of_tests())
            found["log_probs"] = backend.log_probs(build_micro_batches(batch, [[0, 3, 4], [1, 2], [5]])).log_probs
            if module is megatron:
                backend.save_hf(Path(folder) / "saved" / name.replace(" ", "-"))
            return backend

        found |= train(backend_of, args, rank, world_size)
        found.pop("backend")
        results[name] = found
    return results
