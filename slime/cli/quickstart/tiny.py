"""Builds a tiny Qwen3 of three layers that reads single characters and trains in a minute on a laptop.

It starts from random weights. The tokenizer has one token per printable ASCII character, and a chat template
that adds only the end token after a response, so the usual SFT code works unchanged.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNK)
CHARACTERS = "".join(chr(code) for code in range(32, 127))
CONTEXT_LEN = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
)


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per character; ids 0, 1, 2 are padding, end and unknown."""
    # Imported here, so that `slime --help` does not load transformers.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=CONTEXT_LEN,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config() -> "Qwen3Config":
    """Return the config of a model with about 0.15 million parameters."""
    # Imported here, so that `slime --help` does not load transformers.
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_LEN,
        # The usual 0.02 suits models ten times as wide; with it the warm-up would take twice as long.
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )


def make_checkpoint(folder: Path, *, seed: int) -> Path:
    """Write model and tokenizer as a Hugging Face directory; the same seed gives the same bytes."""
    # Imported here, so that `slime --help` does not load torch and transformers.
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(build_config())
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    widen_readers(folder)
    return folder


def edit_json(path: Path, changes: dict[str, Any], *, drop: Collection[str] = ()) -> None:
    """Rewrite the JSON object in `path` with some keys set and others removed."""
    content = json.loads(path.read_text())
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept | changes, indent=2, sort_keys=True) + "\n")


def widen_readers(folder: Path) -> None:
    """Add what transformers 4 needs to read files of transformers 5, which it otherwise misreads silently."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers 4 knows only these two names; without them it uses rope_theta 10000 and float32.
    names = {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": config["dtype"]}
    edit_json(folder / "config.json", names, drop=["quantization_config"])
    # safetensors makes a file that its owner alone can read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    # transformers 4 does not know the class name, and without these input names its tokenizers return
    # token_type_ids, which generate() refuses.
    tokenizer: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    edit_json(folder / "tokenizer_config.json", tokenizer, drop=["backend", "is_local", "local_files_only"])
