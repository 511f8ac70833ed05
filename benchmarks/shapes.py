"""Random-weight Qwen3 models of several sizes, with a tokenizer of single
characters: for benchmarks without a download.
"""

from pathlib import Path
from typing import Any

SHAPES = {
    "0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "4b": dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
}
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
    from slime.cli.quickstart.checkpoint_files import widen_readers
    from slime.utils.accelerator import empty_cache

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
