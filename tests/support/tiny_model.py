"""A tiny random Qwen3 with a character-level tokenizer, in a folder that looks like a hub checkpoint."""

import string
from pathlib import Path

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
NUM_TOKENS = len(SPECIAL_TOKENS) + len(CHARACTERS)  # 100
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer():
    """One token per printable ASCII character; pad is id 0 and end of sequence is `<|im_end|>`, id 2."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", unk_token="<|unk|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    path: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 128,
    context: int = 1024,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    init_std: float = 0.1,
) -> Path:
    """Write config, fp32 weights and tokenizer to `path`, and return it. A seed gives the same weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        initializer_range=init_std,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    path = Path(path)
    model.to(torch.float32).save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path
