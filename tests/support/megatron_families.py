"""Shared by tests of the Megatron model families: a tiny random hub checkpoint of each."""

import json
import re
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
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
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
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope_parameters=YARN,
)
GLM4_MOE = EXPERTS | dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1)
GLM4_MOE |= dict(head_dim=16, attention_bias=True, use_qk_norm=True, rope_parameters=PARTLY_ROTATED)
# Of four layers the last has attention; the second is dense in a mixture of experts.
DELTA_NETS = dict(
    initializer_range=0.1,
    head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
GATED_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
PLAIN_ROPE = dict(rope_type="default", rope_theta=1e4)
DSA = EXPERTS | MLA | dict(index_topk=8, index_head_dim=12, index_n_heads=16, head_dim=8)
# By the name used in the tests: the HF model type that computes the reference, and what differs from COMMON.
FAMILIES = {
    "llama": ("llama", dict(head_dim=8, rope_parameters=LLAMA3)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(
            head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
        ),
    ),
    "glm4": ("glm4", dict(head_dim=16, attention_bias=True, rope_parameters=PARTLY_ROTATED)),
    "mimo": ("qwen2", dict(num_nextn_predict_layers=1)),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe_plain": (
        "glm4_moe",
        GLM4_MOE | dict(use_qk_norm=False, attention_bias=False, n_group=1, topk_group=1),
    ),
    "deepseek_v3": ("deepseek_v3", EXPERTS | MLA),
    "deepseek_v3_plain": (
        "deepseek_v3",
        EXPERTS | MLA | dict(q_lora_rank=None, rope_interleave=False, rope_parameters=PLAIN_ROPE),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        EXPERTS | MLA | dict(n_group=1, topk_group=1, rope_parameters=PLAIN_ROPE),
    ),
    "minimax_m2": (
        "minimax_m2",
        dict(
            head_dim=16,
            intermediate_size=24,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=PARTLY_ROTATED,
        ),
    ),
    "qwen3_next": ("qwen3_next", DELTA_NETS | GATED_EXPERTS | dict(mlp_only_layers=[1])),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_NETS | GATED_EXPERTS),
    # Documents of the tests are longer and shorter than the number of selected keys.
    "glm_moe_dsa": (
        "glm_moe_dsa",
        DSA | dict(rope_parameters=PLAIN_ROPE, indexer_types=["full", "shared", "full", "shared", "full"]),
    ),
    "glm_moe_dsa_short": ("glm_moe_dsa", DSA | dict(index_topk=64, rope_parameters=PLAIN_ROPE)),
    "deepseek_v32": ("deepseek_v32", DSA),
}
# MTP heads: prefix of their tensors, and the parts beside a decoder layer (norm of
# the embedding, norm of the hidden state, the matrix that joins them, last norm).
MTP = {
    "mimo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "glm4_moe": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "deepseek_v3": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen3_next": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "qwen3_5": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "qwen3_5_moe": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "glm4_moe_lite": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "glm_moe_dsa": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "deepseek_v32": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
}
LAYERS = COMMON["num_hidden_layers"]
AROUND_ZERO = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # norms multiply by one more than their weight


def families_of(request, names) -> list[str]:
    """The names of families whose tests were selected: `-k minimax` builds no other model."""
    tests = [item for item in request.session.items if item.fspath == request.node.fspath]
    params = [item.callspec.params.get("name") if hasattr(item, "callspec") else None for item in tests]
    if None in params:
        return list(names)
    return [name for name in names if any(param.split()[0] == name for param in params)]


def make_checkpoint(folder: Path, name: str, **changes) -> tuple[str, str]:
    """(hub checkpoint, the same without MTP heads and of a type that transformers computes).

    Weights are drawn so that every tensor matters: norms around one, biases around zero. The decoder
    layer of a head is the last one of a deeper model, which stays in the folder `{name}-deep`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, extra = FAMILIES[name]
    torch.manual_seed(0)
    deep = {"num_hidden_layers": LAYERS + (name in MTP)}
    if name in AROUND_ZERO:
        deep["layer_types"] = ["linear_attention"] * 3 + ["full_attention"] * (1 + (name in MTP))
    config = AutoConfig.for_model(kind, **(COMMON | extra | deep | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and "inv_freq" not in key:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    if name not in MTP:
        model.save_pretrained(folder / name)
        return str(folder / name), str(folder / name)
    model.save_pretrained(folder / f"{name}-deep")
    return _split_mtp_heads(folder, name)


def _split_mtp_heads(folder: Path, name: str) -> tuple[str, str]:
    from safetensors.torch import load_file, save_file

    prefix, (embedding_norm, hidden_norm, join, last_norm) = MTP[name]
    config = json.loads((folder / f"{name}-deep" / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    for kinds in {"layer_types", "mlp_layer_types", "indexer_types"} & config.keys():
        config[kinds] = config[kinds][:LAYERS]
    last = f"model.layers.{LAYERS}."
    tensors = load_file(folder / f"{name}-deep" / "model.safetensors")
    layer = prefix + "layers.0." * (name in AROUND_ZERO)
    heads = {
        layer + key.removeprefix(last): tensors.pop(key) for key in list(tensors) if key.startswith(last)
    }
    width = COMMON["hidden_size"]
    for part in (embedding_norm, hidden_norm, last_norm):
        heads[f"{prefix}{part}.weight"] = (name not in AROUND_ZERO) + torch.randn(width) * 0.1
    heads[f"{prefix}{join}.weight"] = torch.randn(width, 2 * width) * 0.2
    if name == "glm4_moe":
        # Copies of what the model has: they belong to the checkpoint and to no module.
        heads[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        heads[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if name.startswith("qwen3_5"):
        config, tensors = _beside_a_tower(config | {"mtp_num_hidden_layers": 1}, tensors)
    for path, found, kind in (
        (folder / f"{name}-reference", tensors, config["model_type"]),
        (folder / name, tensors | heads, "mimo" if name == "mimo" else config["model_type"]),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return str(folder / name), str(folder / f"{name}-reference")


def _beside_a_tower(config: dict, tensors: dict) -> tuple[dict, dict]:
    """The checkpoint of a text model as the hub has it: nested beside a vision tower that is not trained."""
    nested = {re.sub(r"^model\.", "model.language_model.", key): tensor for key, tensor in tensors.items()}
    nested["model.visual.patch_embed.proj.weight"] = torch.randn(3, 5)
    kind = config["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": config, "tie_word_embeddings": False}, nested


def mtp_log_probs(folder: Path, name: str) -> list[torch.Tensor]:
    """Log-probs of response tokens under the MTP head, by transformers' layers; nan where it has none."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    prefix, parts = MTP[name]
    hub = load_file(folder / name / "model.safetensors")
    embedding_norm, hidden_norm, join, last_norm = (hub[f"{prefix}{part}.weight"] for part in parts)
    deep = AutoModelForCausalLM.from_pretrained(folder / f"{name}-deep", dtype=torch.float32).eval()
    lm = AutoModelForCausalLM.from_pretrained(folder / f"{name}-reference", dtype=torch.float32).eval()

    def normed(x, weight):
        weight = weight + (name in AROUND_ZERO)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, COMMON["rms_norm_eps"])

    result = []
    for sample in samples_of_tests():
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            hidden, later = (
                lm.model(ids[None]).last_hidden_state[:, :-1],
                lm.model.embed_tokens(ids[None, 1:]),
            )
            both = [normed(later, embedding_norm), normed(hidden, hidden_norm)]
            x = torch.cat(both[::-1] if name == "mimo" else both, -1) @ join.T
            places = torch.arange(x.shape[1])[None]
            angles = deep.model.rotary_emb(x, places)
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
            x = deep.model.layers[LAYERS](
                x, attention_mask=causal, position_ids=places, position_embeddings=angles
            )
            x = x[0] if isinstance(x, tuple) else x
            rows = torch.log_softmax(lm.lm_head(normed(x, last_norm))[0], -1)
        found = torch.full((len(ids),), float("nan"))
        found[2:] = rows[torch.arange(len(ids) - 2), ids[2:]]
        result.append(found[-sample.response_length :])
    return result


def samples_of_tests():
    from trainer_helpers import random_samples

    return random_samples(3, 2, vocab=127, seed=3)


def family_cases(rank: int, world_size: int, cases: dict[str, tuple[str, dict]], folder: str) -> dict:
    """For each (checkpoint, settings): log-probs, a saved HF folder, and three GRPO steps."""
    from megatron_helpers import GRPO, megatron_args, train

    from slime.backends import fsdp, megatron
    from slime.backends.shared.microbatch import build_micro_batches
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
            found["log_probs"] = backend.log_probs(
                build_micro_batches(batch, [[0, 3, 4], [1, 2], [5]])
            ).log_probs
            if module is megatron:
                from slime.backends.megatron.modules.compiled import is_plain  # asks for megatron-core

                found["plain"] = sum(is_plain(part) for chunk in backend.model for part in chunk.modules())
                backend.save_hf(Path(folder) / "saved" / name.replace(" ", "-"))
            return backend

        found |= train(backend_of, args, rank, world_size)
        found.pop("backend")
        results[name] = found
    return results
