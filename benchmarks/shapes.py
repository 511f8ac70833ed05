"""Random-weight Qwen3 models of several sizes, with a tokenizer of single
characters: for benchmarks without a download.
"""

from pathlib import Path
from typing import Any

SHAPES = {
    "0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "4b": dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
    "8b": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
}
# Six layers each: of Qwen3-30B-A3B, and with a router and a shared expert as GLM-4.5 and DeepSeek have them.
# "small-moe" is small enough for hundreds of steps.
MIXTURES = ("moe", "glm", "small-moe", "tiny-moe")
_TINY_VOCAB, _VOCAB = 4096, 151936
_TINY_CONTEXT, _CONTEXT = 2048, 32768


def qwen3_config(shape: str, vocab_size: int | None = None) -> Any:
    """By default hardly any answer ends by itself: the end token is one of thousands."""
    from transformers import Qwen3Config

    tiny = shape == "tiny"
    return Qwen3Config(
        **SHAPES[shape],
        vocab_size=vocab_size or (_TINY_VOCAB if tiny else _VOCAB),
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=_TINY_CONTEXT if tiny else _CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )


def config_of(shape: str, vocab_size: int | None = None) -> Any:
    """The config of a dense shape or of a mixture of experts; "long": a 4B one for long samples."""
    if shape == "long":
        config = qwen3_config("4b")
        config.max_position_embeddings = 2 * 65536
        return config
    if shape not in MIXTURES:
        return qwen3_config(shape, vocab_size)
    from transformers import Glm4MoeConfig, Qwen3MoeConfig

    tiny = shape == "tiny-moe"
    width, inner, layers, heads, experts, chosen = {
        "small-moe": (1024, 512, 8, 16, 32, 4),
        "tiny-moe": (64, 32, 2, 4, 8, 2),
    }.get(shape, (2048, 768, 6, 32, 128, 8))
    common = dict(
        vocab_size=vocab_size or (_TINY_VOCAB if tiny else _VOCAB),
        hidden_size=width,
        intermediate_size=128 if tiny else 6144,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if tiny else 4,
        head_dim=16 if tiny else 128,
        num_experts_per_tok=chosen,
        max_position_embeddings=_TINY_CONTEXT if tiny else _CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    if shape == "glm":
        return Glm4MoeConfig(
            **common, n_routed_experts=128, n_shared_experts=1, n_group=1, topk_group=1,
            first_k_dense_replace=0, use_qk_norm=True,
        )  # fmt: skip
    return Qwen3MoeConfig(**common, num_experts=experts, norm_topk_prob=True)


def write_model(
    shape: str,
    folder: Path,
    *,
    device: str = "cpu",
    weights: bool = True,
    vocab_size: int | None = None,
    seed: int = 0,
) -> Path:
    """A model folder as the hub has them. `weights` False: config and tokenizer
    alone, for an engine that makes its own.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from slime.cli.quickstart import tiny
    from slime.cli.quickstart.tiny import widen_readers
    from slime.utils.machine.accelerator import empty_cache

    config = qwen3_config(shape, vocab_size)
    config.dtype = torch.bfloat16 if shape != "tiny" else torch.float32
    if weights:
        torch.manual_seed(seed)
        with torch.device(device):
            model = Qwen3ForCausalLM._from_config(config, dtype=config.dtype)
        model.save_pretrained(folder)
        del model
        empty_cache()  # engine and trainer will want the room
    else:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
    tokenizer = tiny.build_tokenizer()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    widen_readers(folder)
    return folder
