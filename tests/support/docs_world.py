"""A folder in which commands of the docs and recipes can be read: the files that they name are there."""

import json
import os
import sys
from pathlib import Path

import pytest
from tiny_model import make_tiny_tokenizer

from slime.arguments import parse_args
from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.utils.files.run_file import METRICS_FILE, close_run_file, open_run_file
from slime.utils.types import Sample

ROOT = Path(__file__).parents[2]
PLUGIN = """
from slime.utils.types import Sample

async def generate(args, sample, sampling_params): return sample
def reward(args, sample): return 0.0
def score(args, sample): return 0.0
def commit(args, version_dir, rollout_engines): ...
def keep(args, samples): return True
"""
ROWS = {
    "jsonl": {
        "prompt": "1+1?",
        "input": "1+1?",
        "label": "2",
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        "chosen": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        "rejected": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "3"}],
    }
}
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def make_world(folder: Path) -> Path:
    """`folder` as a clone of the repository would be, with an SGLang environment beside it."""
    for name in ("examples", "recipes", "benchmarks", "tests", "train.py", "train_async.py"):
        (folder / name).symlink_to(ROOT / name)
    python = folder / ".venv-sglang/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    return folder


def provide(folder: Path, words: list[str]) -> None:
    """Make what the words of a command name: prompt files, model folders, functions, YAML."""
    for word in words:
        path = folder / word.partition("@")[0].partition(":")[0]
        if path.exists() or word.startswith(("-", "/", "http")) or not path.is_relative_to(folder):
            continue
        if path.suffix == ".jsonl":
            write(path, json.dumps(ROWS["jsonl"]) + "\n")
        elif path.suffix == ".py":
            write(path, PLUGIN)


def provide_settings(folder: Path, values: dict) -> None:
    """The same for the values of a YAML file, of which some are lists."""
    for value in values.values():
        provide(folder, [str(word) for word in (value if isinstance(value, list) else [value])])


def provide_model(path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(path)
    write(path / "config.json", json.dumps(CONFIG))


def make_run(folder: Path) -> None:
    """The folder of a finished run of 51 steps, with its curve and its samples."""
    folder.mkdir(parents=True)
    open_run_file(folder, {"num_rollout": {"value": 51, "source": "command line"}}, None, None, None)
    writer = RecordWriter(folder / RECORD_FILE, "run", 1 << 20)
    with (folder / METRICS_FILE).open("w") as metrics:
        for step in range(51):
            row = {
                "time": 1.7e9 + step,
                "step": step,
                "rollout/raw_reward": step / 50,
                "rollout/response_len/mean": 16.0,
                "eval/held_out": step / 50,
                "eval/held_out/agent/tool_calls": step / 50,
            }
            metrics.write(json.dumps(row) + "\n")
            sample = Sample(index=0, group_index=0, prompt="1+1?", response="I cannot", reward=step / 50)
            writer.add("train", step, group_entries([[sample]], "trained"))
        writer.add("eval", 50, group_entries([[sample]], "evaluated", dataset="hard"))
    writer.close()
    close_run_file(folder, None)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_settings(words, **options):
    """As a run reads them. Skips where the only thing that is missing is the package of its trainer."""
    try:
        return parse_args(words, **options)
    except ValueError as error:
        if str(error) == "--train-backend megatron needs megatron-core: pip install 'slime-rl[megatron]'.":
            pytest.skip(str(error))
        if "it has no SGLang" in str(error):  # its own flags are known only where it is installed
            given = [at for at, word in enumerate(words) if word.startswith("--sglang-")]
            return parse_args([w for at, w in enumerate(words) if not {at, at - 1} & set(given)], **options)
        raise
