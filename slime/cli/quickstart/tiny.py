"""A model small enough to train in a minute on a laptop: a
three-layer Qwen3 that reads and writes single characters.

It starts from random weights. The tokenizer has one token per printable ASCII character and a chat template
that adds nothing but the end token after an answer, so that the usual SFT path works on it unchanged.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.quickstart.checkpoint_files import widen_readers
from slime.utils.machine import warm_start
from slime.utils.machine.processes import import_environment, thread_environment

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
    """One token per character; ids 0, 1, 2 are padding, end and unknown."""
    # Here, so that `slime --help` does not pay for importing transformers.
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
    """About 0.15 million parameters."""
    # Here, so that `slime --help` does not pay for importing transformers.
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
        # The usual 0.02 suits models ten times as wide; here it would double the length of the warm-up.
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )


def make_checkpoint(folder: Path, *, seed: int) -> Path:
    """Write model and tokenizer as a Hugging Face directory; the same seed gives the same bytes."""
    # Here, so that `slime --help` does not pay for importing torch and transformers.
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


def begin_checkpoint(folder: Path, *, seed: int) -> Callable[[], Path]:
    """Have it made by a process that has imported the model already; call what is returned to have it.

    Where there is no such process it is made by that call.
    """
    done: list[bool] = []

    def ask() -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(folder), str(seed)]
        env = {**os.environ, **thread_environment(1), **import_environment()}
        with open(os.devnull, "wb") as nowhere:
            child = warm_start.fork(command, env, nowhere.fileno())
        done.append(child is not None and child.wait() == 0)

    asking = threading.Thread(target=ask, name="checkpoint", daemon=True)
    asking.start()

    def finish() -> Path:
        asking.join()
        return folder if any(done) else make_checkpoint(folder, seed=seed)

    return finish


def main() -> None:
    """`... FOLDER SEED`, in a process of its own."""
    make_checkpoint(Path(sys.argv[1]), seed=int(sys.argv[2]))
