"""Functions for Python launchers of THUDM/slime (`slime.utils.external_utils.command_utils`).

They kill no processes and start no Ray: a run on several machines joins the existing cluster.
"""

import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.catalog.backends import BACKENDS
from slime.utils.misc import exec_command
from slime.utils.models.model_config import read_config

SCRIPTS = {"train.py": "train", "train_async.py": "train-async"}


@dataclass
class ExecuteTrainConfig:
    """Settings of a launcher, which may subclass it."""

    cuda_core_dump: bool = False
    num_nodes: int = 1
    extra_env_vars: str = ""


def train_words(train_args: str, megatron_model_type: str | None = None) -> list[str]:
    """Split the flags into words; a launcher that names a Megatron model type gets the Megatron trainer."""
    words = shlex.split(os.path.expandvars(train_args))
    named = any(word.split("=")[0] in ("--train-backend", "--backend") for word in words)
    if named or megatron_model_type is None or not _megatron_builds(words):
        return words
    return ["--train-backend", "megatron", *words]


def _megatron_builds(words: list[str]) -> bool:
    """Return whether the Megatron trainer supports the model; True if its config cannot be read."""
    at = words.index("--hf-checkpoint") + 1 if "--hf-checkpoint" in words else len(words)
    kind = read_config(words[at]).get("model_type") if at < len(words) else None
    return kind is None or kind in (BACKENDS["megatron"].families or ())


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], Any] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run the training and wait until it ends; the model's shape is read from its config."""
    words = train_words(train_args, megatron_model_type)
    if num_gpus_per_node is not None and "--num-gpus-per-node" not in words:
        words += ["--num-gpus-per-node", str(num_gpus_per_node)]
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    name = SCRIPTS.get(os.path.basename(train_script))
    command = [sys.executable, *(["-m", "slime", name] if name else [train_script]), *words]
    extra = dict(pair.split("=", 1) for pair in shlex.split(config.extra_env_vars if config else ""))
    done = subprocess.run(command, env=os.environ | extra | dict(extra_env_vars or {}))
    if done.returncode:  # the run has reported the reason
        raise SystemExit(done.returncode)


def convert_checkpoint(model_name: str, *_: object, **__: object) -> None:
    print(f"convert_checkpoint: {model_name} needs no conversion, runs start from Hugging Face folders")


def hf_download_dataset(full_name: str) -> None:
    """Download a dataset to the folder that THUDM's launchers use."""
    folder = "/root/datasets/" + full_name.split("/")[-1]
    exec_command(shlex.join(["hf", "download", "--repo-type", "dataset", full_name, "--local-dir", folder]))


def get_default_wandb_args(
    test_file: str, run_name_prefix: str | None = None, run_id: str | None = None
) -> str:
    """Return the flags of Weights & Biases if a key is set, else none."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    project = os.path.splitext(os.path.basename(test_file))[0]
    group = "_".join(filter(None, [run_name_prefix, run_id or create_run_id()]))
    return f"--use-wandb --wandb-project slime-{project} --wandb-group {group} --disable-wandb-random-suffix "


def create_run_id() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%y%m%d-%H%M%S")


def get_bool_env_var(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1")


def get_env_enable_infinite_run() -> bool:
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=f".{ext}", delete=False) as file:
        file.write(text)
    return file.name
